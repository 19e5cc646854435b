#!/bin/bash
reward=0
if [ "$(bash /app/greet.sh world)" = "hello, world" ] && ! bash /app/greet.sh > /dev/null; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
