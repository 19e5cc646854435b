"""`inference --join ADDRESS`: start an engine that joins a running run. Flags and files go over the run's own keys."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import replace

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.base.log import get_logger, start_logging
from trireme.base.network import EVERYWHERE, address_towards, is_loopback
from trireme.base.processes import catch_signals, free_port
from trireme.base.token import adopt_token
from trireme.cli.command import show
from trireme.config.engine_facts import engine_facts
from trireme.config.files import write_run
from trireme.config.load import load_run_config
from trireme.config.resolve import KNOWN_PORTS, resolve, updated
from trireme.config.rules.check import check, check_launch
from trireme.config.run import place_of
from trireme.launch.joined_engine import Membership, serve
from trireme.launch.plan import plan
from trireme.messages import Terms

log = get_logger("inference")


def join(argv: list[str]) -> int:
    """Join, serve and leave. Return the exit code.

    Raises: ConfigError if this machine cannot serve the run's model, or the run refuses this engine.
    """
    typed, invocation = load_run_config(argv, section="inference", program="inference")
    os.environ.update(typed.env_vars)
    adopt_token(typed.hosts.token_file)
    start_logging("inference", typed.log_level)
    try:
        host, port = place_of(invocation.join or "")
    except ValueError:
        raise ConfigError(
            f'`--join {invocation.join}` is no address - expected the orchestrator\'s, as "10.0.0.10" or '
            '"10.0.0.10:5555" (`ports.batches`). `trireme status RUN` shows it.'
        ) from None

    address = f"{host}:{port or KNOWN_PORTS['ports.batches']}"
    patience_s = typed.inference.start_timeout_s
    with catch_signals() as signals, closing(Membership(address, signals, patience_s=patience_s)) as membership:
        log.info("joining the run at %s", address)
        terms = membership.terms()
        return _serve(argv, host, terms, membership, signals) if terms is not None else 0


def _serve(argv: list[str], host: str, terms: Terms, membership: Membership, signals: list[int]) -> int:
    # The run's own keys lie beneath what was typed here; addresses and GPUs are this machine's.
    config, invocation = load_run_config(argv, section="inference", program="inference", beneath=json.loads(terms.run))
    bound = config.inference.server.host if "host" in config.inference.server.model_fields_set else EVERYWHERE
    own = "127.0.0.1" if is_loopback(host) else address_towards(host) or host
    values = {
        "hosts.orchestrator": host,
        "hosts.inference": (own if bound in (EVERYWHERE, "::", "") else bound,),
        "inference.server.port": config.inference.server.port or free_port(EVERYWHERE),
    }
    config, devices = updated(config, values), detect_devices()
    with invocation.their_keys_named():
        config = resolve(config, devices, section="inference")
        check(config, devices, section="inference")
    if invocation.dry_run:
        return ConfigError.exit_code if show(config, devices, "inference") else 0
    check_launch(config, devices, section="inference")

    # Nothing expensive is loaded before the run has accepted this engine.
    url, facts = f"http://{config.hosts.inference[0]}:{config.inference.server.port}", engine_facts(config)
    if not membership.register(terms, url, facts):
        return 0

    name = f"inference-{membership.id}"
    run_file = config.paths.configs / f"{name}.json"
    write_run(config, run_file)
    spec = replace(plan(config, run_file, devices)["inference"], log=config.paths.logs / f"{name}.stdout")
    log.info("engine %d of the run at %s; log of its server: %s", membership.id, host, spec.log)
    return serve(spec, membership, signals, url=url, facts=facts, drain_timeout_s=config.inference.drain_timeout_s)
