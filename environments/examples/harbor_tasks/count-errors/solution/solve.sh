#!/bin/bash
cat logs/*.log | grep -c ERROR > answer.txt
