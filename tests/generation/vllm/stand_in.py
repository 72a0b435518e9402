"""A program in place of an interpreter with vLLM: it speaks the messages of `child`, and counts tokens upwards.

Behaviours show what may go wrong: no vLLM, another version, death, silence, an error, old weights, broken messages.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path

_PROGRAM = """#!{python}
import hashlib, importlib.util, os, signal, socket, sys, time

def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

child = load("child", sys.argv[1])
behaviour, folder = {behaviour!r}, {folder!r}
version = {{"absent": None, "old": "0.11.2"}}.get(behaviour, "0.32.0")
if len(sys.argv) == 2:  # a check before the run
    print(child.json.dumps(dict(vllm=version)))
    sys.exit()

def note(text):
    with open(folder + "/notes", "a") as notes:
        print(text, file=notes)

def respond(request, sampling, label):
    tokens, last = [], request["prompt"][-1]
    while len(tokens) < request["max_tokens"] and (not tokens or tokens[-1] not in sampling["stop_token_ids"]):
        last = (last + 1) % 128
        tokens.append(last)
    reason = "stop" if tokens[-1] in sampling["stop_token_ids"] else "length"
    logprobs = [-1.0] * len(tokens)
    return dict(index=request["index"], token_ids=tokens, logprobs=logprobs, reason=reason, versions=[label])

def complete_by_steps(message, label):
    sampling = message["sampling"]
    engine = load("counting_engine", {counting!r}).CountingEngine(sampling["stop_token_ids"])
    num_cut = 0

    def response_of(output):
        (made,) = output.outputs
        logprobs = [-1.0] * len(made.token_ids)
        return dict(index=int(output.request_id), token_ids=made.token_ids, logprobs=logprobs,
                    reason=made.finish_reason, versions=[label])

    def say(told):
        nonlocal num_cut
        num_cut += told.get("response", {{}}).get("reason") == "unfinished"
        if num_cut == 2 and behaviour == "dies while it cuts" and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        if "spent" in told:
            note(f"asked {{told['spent']}}")
        child.send(connection, told)
        if "spent" in told and behaviour == "dies when it has asked" and is_first:
            os.kill(os.getpid(), signal.SIGKILL)

    loop = child._load("inside/child_requests.py").RequestLoop(
        engine, most_running=settings["llm"]["max_num_seqs"], add=engine.add_request, response_of=response_of,
        say=say, receive=lambda: child.receive(connection),
    )
    done = loop.run(message["requests"], message["budget"])
    note(f"cut {{num_cut}}")
    return done

def framed(content):
    return len(content).to_bytes(4, "big") + content

full = dict(index=1, token_ids=[], logprobs=[], reason="stop", versions=[])
broken = dict(
    empty=framed(b""), huge=(600 << 20).to_bytes(4, "big"), text=framed(b"not json"), array=framed(b"[1]"),
    unknown=framed(child.json.dumps(dict(response=dict(full, index=9))).encode()),
    kinds=framed(child.json.dumps(dict(response=dict(full, token_ids="abc", logprobs=[1, 2, 3]))).encode()),
    done=framed(b'{{"done": 3}}'),
)
connection = socket.socket(fileno=int(sys.argv[2]))
is_first = not os.path.exists(folder + "/notes")
note(f"started {{os.getpid()}}")
child.send(connection, dict(vllm=version))
settings = child.receive(connection)
if settings is None:
    sys.exit()
files = sorted(os.listdir(settings["llm"]["model"]))
note("settings " + child.json.dumps(dict(settings, files=files)))
if behaviour == "reads no images" and settings["images"] is not None:
    child.send(connection, dict(refused="vLLM reads no images\\n with Llava; use engine='native'"))
    sys.exit()
if behaviour == "does not start":
    print("out of memory", flush=True)
    sys.exit(3)
if behaviour == "warns and does not start":
    print("RuntimeError: no kernel for this device", *["WARNING " + "long " * 40] * 9, sep="\\n", flush=True)
    sys.exit(3)
child.send(connection, dict(max_model_len=128, device="cpu"))
label = "none"
while (message := child.receive(connection)) is not None:
    do = message["do"]
    if do == "generate":
        note("sampling " + child.json.dumps(message["sampling"]))
        if "budget" in message:
            note("budget " + child.json.dumps(message["budget"]))
            for request in message["requests"]:
                note("request " + child.json.dumps(request))
            child.send(connection, dict(done=complete_by_steps(message, label)))
            continue
        for number, request in enumerate(message["requests"]):
            note("request " + child.json.dumps(request))
            for path in request["images"]:
                note("image " + hashlib.sha256(open(path, "rb").read()).hexdigest())
            if number == 1 and behaviour == "error":
                child.send(connection, dict(error="ValueError: no such kernel"))
            if number == 1 and (behaviour == "dies" or (behaviour == "dies once" and is_first)):
                print("WARNING: went on after ValueError: no tokenizer", "segmentation fault", sep="\\n", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 1 and behaviour == "silent":
                time.sleep(60)
            if number == 1 and behaviour == "closes its connection":
                connection.close()
                time.sleep(60)
            if number == 1 and behaviour == "drips":
                for byte in (600).to_bytes(4, "big") + b"[" * 600:
                    connection.send(bytes([byte]))
                    time.sleep(0.1)
            if number == 1 and behaviour == "leaves a process":
                if os.fork() == 0:
                    os.setsid()
                    note(f"left {{os.getpid()}}")
                    time.sleep(60)
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 1 and behaviour in broken:
                connection.sendall(broken[behaviour])
                time.sleep(60)
            child.send(connection, dict(response=respond(request, message["sampling"], label)))
            child.send(connection, dict(alive=number))
        child.send(connection, dict(done=dict(num_steps=7)))
        continue
    if do == "finish_update":
        note("weights " + message["version"])
        label = "default" if behaviour == "keeps old weights" else message["version"]
    if do == "use_adapters":
        note("adapters " + message["version"])
        label = message["version"]
    found = [dict(faults=[], uncompared=[], seconds=0.0)]
    if behaviour == "finds other weights":
        faults = [["model.norm.weight", "arrived 0 times"], ["lm_head.weight", "arrived 2 times"]]
        found.append(dict(found[0], faults=faults))
    child.send(connection, dict(done=None if message.get("expected") is None else found))
"""


def stand_in(folder: Path, behaviour: str = "") -> str:
    """Return the path of the program; it notes its starts, updates of weights and requests in ``folder/notes``."""
    path = folder / "python"
    counting = str(Path(__file__).with_name("counting_engine.py"))
    path.write_text(_PROGRAM.format(python=sys.executable, behaviour=behaviour, folder=str(folder), counting=counting))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def notes(folder: Path, kind: str) -> list[str]:
    """Return the rest of the notes that begin with a word: ``started`` (process ids), ``settings`` (JSON), ``weights``
    and ``adapters`` (labels), ``sampling``, ``request`` and ``budget`` (JSON), ``asked`` (steps before a question about
    the budget), ``cut`` (number of requests), or ``image`` (hashes of files)."""
    lines = (folder / "notes").read_text().splitlines()
    return [line.removeprefix(f"{kind} ") for line in lines if line.startswith(f"{kind} ")]
