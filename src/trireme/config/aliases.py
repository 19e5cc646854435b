"""Names that people bring from elsewhere: those that we take, and those that we only point to ours."""

from __future__ import annotations

# Taken as if the second had been typed.
ALIASES = {
    "orchestrator.environment": "orchestrator.env",
}

# Taken on the command line only: short for what is typed often.
SHORT_FLAGS = {
    "restart": "supervisor.restart",
}

# Refused, with a word on where to go: a key's last part -> our key.
KNOWN_ELSEWHERE = {
    "learning_rate": "trainer.optim.lr",
    "lr_scheduler_type": "trainer.scheduler.type",
    "max_grad_norm": "trainer.optim.max_norm",
    "micro_batch_size": "trainer.micro_batch_tokens",
    "gradient_checkpointing": "trainer.model.ac.freq",
    "bf16": "trainer.model.optimization_dtype",
    "use_lora": "trainer.model.lora.rank",
    "lora_rank": "trainer.model.lora.rank",
    "lora_alpha": "trainer.model.lora.alpha",
    "lora_dropout": "trainer.model.lora.dropout",
    "lora_target_modules": "trainer.model.lora.target_modules",
    "lora_modules_to_save": "trainer.model.lora.modules_to_save",
    "lora_use_rslora": "trainer.model.lora.use_rslora",
    "beta": "trainer.loss.kl_tau",
    "checkpointing": "trainer.ckpt",
    "save_every_n_steps": "trainer.ckpt.interval",
    "keep_n_checkpoints": "trainer.ckpt.keep_last",
    "num_generations": "orchestrator.rollouts_per_example",
    "use_difficulty_filtering": "orchestrator.buffer.online_difficulty_filtering",
    "eval_steps": "orchestrator.eval.interval",
    "generation_timeout": "orchestrator.engine_timeout_s",
    "num_batches_ahead": "max_async_level",
    "async_level": "max_async_level",
    "max_seq_len": "seq_len",
    "run_name": "name",
    "max_retries": "supervisor.max_restarts",
    "auto_restart": "supervisor.restart",
    "model_name": "model.name",
    "report_to": "wandb.project",
    "num_gpus": "inference_gpus",
    "gpus": "inference_gpus",
    "tensor_parallel_size": "inference.parallel.tp",
    "data_parallel_size": "inference.parallel.dp",
    "vllm_server_host": "inference.server.host",
    "vllm_server_port": "inference.server.port",
    "vllm_server_timeout": "inference.start_timeout_s",
    "port": "inference.server.port",
}
