"""What `node.sh` and the batch script have in common: an array `children` of processes, one of which leads."""

WAITING = r"""
# exit_of PID: waits for it. A signal ends `wait` early: it is asked again then.
exit_of() {
  local code
  while :; do
    wait "$1"
    code=$?
    kill -0 "$1" 2>/dev/null || return "$code"
  done
}

# wait_for LEADER: until that child ends, or another fails. The others are ended then, too.
wait_for() {
  local leader=$1 number code=0 tenths
  while [ "$code" = 0 ] && kill -0 "${children[$leader]}" 2>/dev/null; do
    for number in "${!children[@]}"; do
      [ "$number" != "$leader" ] || continue
      kill -0 "${children[$number]}" 2>/dev/null && continue
      exit_of "${children[$number]}"
      code=$?
      unset "children[$number]"
      [ "$code" = 0 ] || break
    done
    sleep 0.5 &
    wait $! # ends at a signal
  done
  if [ "$code" = 0 ]; then
    exit_of "${children[$leader]}"
    code=$?
  fi
  ask_all_to_end
  for ((tenths = 0; tenths < GRACE_S * 10; tenths++)); do
    kill -0 "${children[@]}" 2>/dev/null || break
    sleep 0.1
  done
  return "$code"
}

children=()
stopping=
trap 'stopping=yes; ask_all_to_end' TERM INT URG
"""


def waiting(ask: str, grace_s: int) -> str:
    """
    Args:
        ask: a command that asks all children to end.
        grace_s: how long they may take. What is left then, the scheduler ends.
    """
    functions = WAITING.strip("\n").replace("GRACE_S", str(grace_s))
    return f"ask_all_to_end() {{ {ask} 2>/dev/null; }}\n\n{functions}"
