#!/bin/bash
sed -i 's/^    exit 2$/    exit 2\nfi/' greet.sh
