"""Colours of the dashboard."""

ACTIVITIES = {
    "train": "#7c5cff",
    "generate": "#14b8a6",
    "transfer": "#3b82f6",
    "evaluate": "#ec4899",
    "save": "#f59e0b",
    "journal": "#a3763d",
    "start": "#64748b",
    "wait": "#e5647a",
    "idle": "#f0a8b3",
    "other": "#a5adbf",
}
"""Colours of what processes do: cool for work, red for waiting."""
RUNS = ("#7c5cff", "#0ea5a0", "#f08c00", "#e64980", "#228be6", "#74b816", "#c2410c", "#7e8aa6")
"""Runs that are compared, or curves of one run, by their place."""
