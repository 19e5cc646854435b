#!/bin/bash
total=0
while read -r number; do
    total=$((total + number))
done < numbers.txt
echo "$total" > sum.txt
