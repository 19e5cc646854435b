#!/usr/bin/env bash
# Three panes that follow the logs of a run, also before it has started.
#
#   scripts/tmux.sh [RUN_FOLDER] [SESSION]      defaults: outputs, trireme
#
# An existing session of that name is attached to as it is. Leave with Ctrl-b d; `tmux kill-session -t SESSION` ends it.
set -euo pipefail

run=${1:-outputs}
session=${2:-trireme}

if ! command -v tmux >/dev/null; then
    echo "tmux was not found in PATH; it is what this script drives. Install it, or: tail -F $run/logs/*.stdout" >&2
    exit 1
fi

follow() { # the log may not exist yet, nor its folder
    printf 'tail -n 200 -F %q 2>/dev/null' "$run/logs/$1.stdout"
}

open_session() {
    local trainer orchestrator inference
    trainer=$(tmux new-session -d -P -F '#{pane_id}' -s "$session" -n "$(basename "$run")" "$(follow trainer)")
    orchestrator=$(tmux split-window -d -P -F '#{pane_id}' -t "$trainer" "$(follow orchestrator)")
    inference=$(tmux split-window -d -P -F '#{pane_id}' -t "$orchestrator" "$(follow inference)")
    tmux select-layout -t "$trainer" even-vertical >/dev/null
    tmux select-pane -t "$inference" -T inference
    tmux select-pane -t "$orchestrator" -T orchestrator
    tmux select-pane -t "$trainer" -T trainer
    tmux set-option -t "$session" pane-border-status top >/dev/null
    tmux set-option -t "$session" pane-border-format " #{pane_title} " >/dev/null
    tmux set-option -t "$session" set-titles on >/dev/null
    tmux set-option -t "$session" set-titles-string "trireme $run" >/dev/null
}

tmux has-session -t "=$session" 2>/dev/null || open_session

if [ ! -t 1 ]; then
    echo "session $session is open: tmux attach -t $session"
elif [ -n "${TMUX:-}" ]; then
    tmux switch-client -t "=$session"
else
    tmux attach-session -t "=$session"
fi
