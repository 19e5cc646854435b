#!/bin/bash
if [ -z "$1" ]; then
    echo "usage: greet.sh NAME"
    exit 2
echo "hello, $1"
