"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("inference", "plan", "text")
ENTRIES = {
    "action": {"profile": "megatoken.study.profile:open_profile"},
    "observer": {
        "plots": "megatoken.study.observers:open_plots",
        "sinks": "megatoken.study.observers:open_sinks",
    },
    "command": {
        "race": "megatoken.study.commands.race",
        "sweep": "megatoken.study.commands.sweep",
        "scaling": "megatoken.study.commands.scaling",
        "reproduce": "megatoken.study.commands.reproduce",
        "bench": "megatoken.study.commands.bench",
        "plot": "megatoken.study.commands.plot",
        "report": "megatoken.study.commands.report",
        "sync": "megatoken.study.commands.sync",
    },
    "section": {"log": "megatoken.study.settings:ReportConfig"},
    "check": {"sinks": "megatoken.study.check:check_log"},
    "sink": {
        "tensorboard": "megatoken.study.sinks:TensorBoard",
        "wandb": "megatoken.study.sinks:WandB",
        "mlflow": "megatoken.study.sinks:MLflow",
        "trackio": "megatoken.study.sinks:Trackio",
        "alert": "megatoken.study.alerts:Alerts",
        "prometheus": "megatoken.study.prometheus:Prometheus",
    },
}
