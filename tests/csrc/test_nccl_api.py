"""Which NCCL is loaded, what it has, and how its absence is told; the real library where there is one."""

import json
import os
import subprocess
import sys

import pytest

import tritondt._C
from tests.csrc.nccl.recording import build, compiled
from tests.csrc.nccl.wheel import find_nccl, find_version, versions
from tritondt._C import NcclError, NcclLibrary, NcclUnsupportedError

SONAME = "-Wl,-soname,libnccl.so.2"
# The extension alone, without torch, which may have loaded an NCCL of its own.
LOAD_EXTENSION = f"""
import ctypes, importlib.util, json
spec = importlib.util.spec_from_file_location("_C", {tritondt._C.__file__!r})
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
"""


def run(program, **variables):
    """Runs a program that has the extension as `_C`, and returns what it printed as JSON."""
    ran = subprocess.run(
        [sys.executable, "-S", "-c", LOAD_EXTENSION + program],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        env={**os.environ, **variables},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_a_path_that_is_asked_for_is_loaded(libraries):
    nccl = libraries(22703).nccl
    assert (nccl.version, nccl.version_code, nccl.origin) == ("2.27.3", 22703, "explicit")
    assert nccl.path == str(build(22703))


def test_a_missing_library_is_named(tmp_path):
    path = tmp_path / "libnccl.so.2"
    with pytest.raises(NcclError) as raised:
        NcclLibrary(str(path))
    assert str(raised.value) == (
        f"NCCL was to be loaded from {path}, which failed: {path}: cannot open shared object file: "
        "No such file or directory"
    )


def test_a_library_that_is_no_nccl_is_refused(tmp_path):
    source = tmp_path / "nothing.cpp"
    source.write_text("int nothing;\n")
    path = compiled(source, tmp_path / "nothing.so")
    with pytest.raises(NcclError, match=rf"^{path} is no NCCL: it has no ncclGetVersion$"):
        NcclLibrary(str(path))


def test_an_old_library_is_refused(tmp_path):
    """The stub has the version of an old NCCL, and nothing else."""
    source = tmp_path / "old_nccl_stub.cpp"
    source.write_text('extern "C" int ncclGetVersion(int* version) { return *version = 21701, 0; }\n')
    path = compiled(source, tmp_path / "old_nccl_stub.so")
    with pytest.raises(NcclUnsupportedError) as raised:
        NcclLibrary(str(path))
    assert str(raised.value) == f"NCCL 2.17.1 ({path}) was found; the oldest that can be used is 2.18.1"


def test_no_library_at_all_says_what_to_do():
    program = """
try:
    _C.NcclLibrary()
except _C.NcclError as error:
    print(json.dumps([str(error), error.function]))
"""
    assert run(program) == [
        "no NCCL was found: this process has loaded no libnccl.so.2, and neither nvidia-nccl-cu12 nor nvidia-nccl-cu13 "
        "is installed. Install the one for torch's CUDA, or name a library with TRITONDT_NCCL_SO",
        "dlopen",
    ]


def test_the_loaded_library_goes_before_the_installed_one():
    loaded, other = build(23007, SONAME), build(23203)
    program = f"""
found = [_C.NcclLibrary(installed_path={str(other)!r})]
ctypes.CDLL({str(loaded)!r})
found += [_C.NcclLibrary(installed_path={str(other)!r}), _C.NcclLibrary({str(other)!r})]
print(json.dumps([(one.origin, one.version, one.path) for one in found]))
"""
    assert run(program) == [
        ["installed", "2.32.3", str(other)],
        ["loaded", "2.30.7", str(loaded)],
        ["explicit", "2.32.3", str(other)],
    ]


def test_a_second_copy_does_not_call_into_the_first():
    """NCCL calls its own functions by name: without RTLD_DEEPBIND, those of a global first copy."""
    first, second = build(23007, SONAME), build(23203, SONAME)
    program = f"""
ctypes.CDLL({str(first)!r}, mode=ctypes.RTLD_GLOBAL)
found = _C.NcclLibrary({str(second)!r})
print(json.dumps([found.version, ctypes.CDLL({str(second)!r}).recording_version_by_name()]))
"""
    assert run(program) == ["2.32.3", 23203]


def test_functions_that_are_used_have_a_version(libraries):
    nccl = libraries(22703).nccl
    assert nccl.has("ncclCommShrink")
    assert not nccl.has("ncclAlltoAll")
    assert ("ncclCommShrink", "2.27.3", True) in nccl.symbols()
    assert ("ncclAlltoAll", "2.28.3", False) in nccl.symbols()
    with pytest.raises(KeyError, match="ncclFrobnicate is no function of NCCL that is used here"):
        nccl.has("ncclFrobnicate")


def test_memory_pools_are_served_by_one_library():
    """By C functions of the extension, as torch's pools call them."""
    library, other, old = build(23203), build(23007), build(21801)
    program = f"""
told = []
def tell(run):
    try:
        told.append(run())
    except _C.NcclError as error:
        told.append(str(error))
tell(_C.NcclLibrary({str(old)!r}).serve_pool)
allocate, free = _C.NcclLibrary({str(library)!r}).serve_pool()
tell(_C.NcclLibrary({str(other)!r}).serve_pool)
tell(_C.NcclLibrary({str(library)!r}).serve_pool)
extension = ctypes.CDLL(_C.__file__)
extension[allocate].restype = ctypes.c_void_p
address = extension[allocate](ctypes.c_size_t(4096), 0, None)
extension[free](ctypes.c_void_p(address), ctypes.c_size_t(4096), 0, None)
recorder = ctypes.CDLL({str(library)!r})
recorder.recording_take.restype = ctypes.c_char_p
print(json.dumps([told, recorder.recording_take().decode().splitlines(), address]))
"""
    told, recorded, address = run(program)
    assert told[0].startswith("ncclMemAlloc was asked for; NCCL has it from 2.19.1 on, and NCCL 2.18.1 (")
    assert told[1:] == [
        f"NCCL 2.30.7 ({other}) was to serve memory; NCCL 2.32.3 ({library}) does so in this process already",
        ["tritondt_nccl_allocate", "tritondt_nccl_free"],
    ]
    assert recorded == ["ncclMemAlloc 4096", f"ncclMemFree {address}"]


@pytest.mark.nccl
def test_a_preloaded_library_is_not_loaded_again():
    """So torch is given the library that TRITONDT_NCCL_SO names."""
    path = str(find_nccl().library)
    program = f"""
found = [_C.NcclLibrary({path!r}), _C.NcclLibrary()]
maps = open("/proc/self/maps").read().splitlines()
print(json.dumps([[one.origin for one in found], len({{line.split()[-1] for line in maps if "libnccl" in line}})]))
"""
    assert run(program, LD_PRELOAD=path) == [["explicit", "loaded"], 1]


def numbers(version):
    return [int(part) for part in version.split(".")]


@pytest.fixture(scope="session", params=versions())
def real(request):
    """What the real library of a version says, and then what where there is no device."""
    found = find_version(request.param)
    program = f"""
nccl = _C.NcclLibrary({str(found.library)!r})
errors = []
for options in (None, {{"blocking": 0, "net_name": "Socket"}}):
    try:
        nccl.init([nccl.unique_id()], 1, 0, options)
        errors.append(None)
    except _C.NcclError as error:
        errors.append([str(error), error.function, error.result])
ids = [nccl.unique_id() for _ in range(2)]
print(json.dumps([nccl.path, nccl.version, nccl.symbols(), [len(each) for each in ids], len(set(ids)), errors]))
"""
    return found, *run(program)


@pytest.mark.nccl
def test_the_real_library_has_what_its_version_has(real):
    found, path, version, symbols, id_lengths, num_ids, _ = real
    assert (path, version) == (str(found.library.resolve()), found.version)
    assert len(symbols) == 52
    for name, since, is_there in symbols:
        assert is_there == (numbers(since) <= numbers(version)), name
    assert (id_lengths, num_ids) == ([128, 128], 2)


@pytest.mark.nccl
def test_the_real_library_says_that_there_is_no_driver(real):
    _, path, version, _, _, _, errors = real
    if None in errors:
        pytest.skip("there is a device")
    for text, function, result in errors:
        assert function == "ncclCommInitRankConfig"
        assert result == "ncclUnhandledCudaError"
        assert text.startswith("ncclCommInitRankConfig: ncclUnhandledCudaError, unhandled cuda error")
        assert "CUDA driver version is insufficient" in text
        assert text.endswith(f"; NCCL {version} ({path})")
