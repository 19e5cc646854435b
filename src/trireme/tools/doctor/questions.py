"""All that the doctor asks, in the order in which it does: what costs nothing first, the run itself last."""

from __future__ import annotations

from trireme.tools.doctor.clocks import clock
from trireme.tools.doctor.configuration import configuration
from trireme.tools.doctor.disks import disk
from trireme.tools.doctor.finding import Question
from trireme.tools.doctor.hosts import hosts
from trireme.tools.doctor.models import model
from trireme.tools.doctor.network import collectives, free_ports, http, zeromq
from trireme.tools.doctor.rehearsal import environments, run
from trireme.tools.doctor.resources import limits, memory, shared_memory
from trireme.tools.doctor.software import byte_code, gpus, libraries, python, torch, vllm

BEFORE = (
    Question("configuration", "Does the configuration agree with itself and this machine?", configuration),
    Question("python", "Is this a Python that Trireme runs with?", python),
    Question("libraries", "Are the libraries here, and those that were tested?", libraries),
    Question("byte-code", "Are torch and vLLM compiled to byte code?", byte_code),
    Question("memory", "Is there memory for trainer and engine?", memory),
    Question("shared-memory", "Is there memory that processes can share?", shared_memory),
    Question("limits", "Does the kernel let processes have what they need?", limits),
    Question("disk", "Is the disk fast enough, and is there room?", disk),
    Question("clock", "Can the clock be trusted?", clock),
    Question("ports", "Are the run's ports free?", free_ports),
    Question("http", "Do HTTP servers answer at the run's addresses?", http),
    Question("zeromq", "Do trainer and orchestrator hear each other?", zeromq),
    Question("hosts", "Can the other machines be reached, with the token?", hosts),
    Question("model", "Are the model's files all there, and whole?", model),
)
AFTER = (
    Question("torch", "Does torch load and compute?", torch, is_slow=True),
    Question("gpus", "Do the GPUs answer, and compute?", gpus, is_slow=True),
    Question("vllm", "Does vLLM load, with our part in it?", vllm, is_slow=True),
    Question("collectives", "Do two processes add and send tensors?", collectives, is_slow=True),
    Question("environments", "Do the environments load and score?", environments, is_slow=True),
    Question("run", "Do three steps of the run itself work?", run, is_slow=True, wants_health=True),
)
