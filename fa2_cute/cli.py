"""The command ``fa2-cute``. What is wrong is said in one line on stderr, with a non-zero exit code."""

import functools
import inspect
import platform
import random
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .resources import ToolMissing

app = typer.Typer(help="FlashAttention-2 for sm_120 in CuTe DSL.", add_completion=False, pretty_exceptions_enable=False)
# What a table needs; a terminal has its own width, a pipe has none.
PIPE_WIDTH = 100
BENCH_WIDTH = 200
COMPONENTS = (
    "torch",
    "numpy",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "cuda-python",
    "nvidia-cuda-cuobjdump",
)

# Errors whose message is for the person at the keyboard. Others are faults of the project, with a traceback.
EXPECTED = (ValueError, ToolMissing, OSError)

# What a tile consists of, where it is one option.
_OF_TILE = {name: f"--tile: {name}" for name in ("tile_m", "tile_n", "warps", "stages")}


def _command(name: str | None = None, also: Mapping[str, str] | None = None, **options) -> Callable:
    """``app.command``, so that errors call arguments what was typed: --head-dim where a check says head_dim.

    also: what is typed for arguments that are called otherwise where they are checked.
    """

    def register(function: Callable) -> Callable:
        typed = {parameter: "--" + parameter.replace("_", "-") for parameter in inspect.signature(function).parameters}
        typed |= also or {}

        @functools.wraps(function)
        def run(**given):
            try:
                return function(**given)
            except ValueError as error:
                argument, colon, rest = str(error).partition(": ")
                if not colon or argument not in typed:
                    raise
                raise ValueError(f"{typed[argument]}: {rest}") from error

        return app.command(name, **options)(run)

    return register


def _path(text: str | Path) -> Path:
    """A file or folder as it was typed; of nothing ``Path`` would make the current folder."""
    if text == "":
        raise typer.BadParameter("got '', takes a path")
    return Path(text)


# An option that names what is written to.
_output_option = functools.partial(typer.Option, parser=_path, metavar="<path>")


def _console(pipe_width: int = PIPE_WIDTH) -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=pipe_width)


def _device(name: str | None):
    """The torch device asked for; by default a GPU where there is one."""
    wrong = f"--device: got {name!r}, takes cpu, cuda or cuda:N"
    if name is not None and name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(wrong)  # before torch is loaded
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(wrong) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: got {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return device


@app.callback()
def _commands():
    """FlashAttention-2 for sm_120 in CuTe DSL."""


@_command()
def demo(
    device: Annotated[
        str | None, typer.Option(help="cpu (emulated), cuda or cuda:N; by default a GPU if there is one")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the random numbers")] = 0,
):
    """Prefill and single-query steps on a growing cache, judged against float64; 1 if any is off."""
    where, console = _device(device), _console()
    from . import demo as demonstration

    faults = demonstration.run(where, console, seed=seed)
    for fault in faults:
        console.print(f"[red]off:[/] {fault}")
    if faults:
        raise typer.Exit(1)
    console.print("[green]All is well.[/]")


@_command()
def fuzz(
    minutes: Annotated[float, typer.Option(help="how long to draw cases")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="of the cases; by default a new one, which is printed")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu (emulated), cuda or cuda:N; by default a GPU if there is one")
    ] = None,
    folder: Annotated[Path, _output_option(help="where failing calls are saved as programs")] = Path("fuzz-failures"),
):
    """Draw calls of the forward functions and over KV caches, all options, and judge each against float64; 1 if any
    fails."""
    if not minutes > 0:
        raise ValueError(f"--minutes: got {minutes:g}, takes more than 0")
    where = str(_device(device))
    try:
        from .fuzz import command
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "hypothesis":
            raise
        raise ToolMissing("fuzz: needs hypothesis, which the extra 'test' brings: pip install -e '.[test]'") from None
    if seed is None:
        seed = random.randrange(2**32)
    if command.run(minutes, seed, where, folder, _console()).failures:
        raise typer.Exit(1)


@_command("compile", also={"value_dim": "--head-dim: value_dim"})
def compile_kernels(
    arch: Annotated[list[str] | None, typer.Option(help="sm_120a and the like, repeatable; by default sm_120a")] = None,
    into: Annotated[
        Path | None, _output_option(help="a folder to ship, for FA2_CUTE_CACHE; by default this user's cache")
    ] = None,
    head_dim: Annotated[
        list[str] | None,
        typer.Option(help="such as 96, or 192x128 with a value_dim of its own, repeatable; by default 64 and 128"),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="repeatable; by default float16 and bfloat16")] = None,
    features: Annotated[
        list[str] | None,
        typer.Option(
            help="options of calls, joined by +, repeatable: full, causal, window, varlen, softcap, alibi, sink, "
            "mask=bool ...; by default full and causal"
        ),
    ] = None,
    kvcache: Annotated[
        bool,
        typer.Option(
            "--kvcache", help="also what most calls over KV caches need (docs/cache.md): decode, combine, append"
        ),
    ] = False,
    cache_dtype: Annotated[
        list[str] | None, typer.Option(help="float8_e4m3fn or float8_e5m2, repeatable, for --kvcache")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="processes that compile; by default one a core, 16 at most")] = None,
):
    """Compile kernels ahead of their first calls; needs no GPU. Others are compiled when they are first called.

    By default an architecture's eight most common ones. A folder is for hosts with this one's version of the compiler
    and this one's kind of processor: elsewhere its kernels are not found, and made again.
    """
    from rich.progress import track

    from . import arch as architectures
    from . import shipping, store

    where = store.Store(into) if into is not None else store.default()
    if where is None:
        raise ValueError("FA2_CUTE_CACHE: is off, so there is nowhere to keep kernels; give --into a folder")
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs: got {jobs}, takes 1 or more")
    if cache_dtype and not kvcache:
        raise ValueError(f"--cache-dtype: got {cache_dtype[0]} without --kvcache, takes both or none")
    given = {
        "dtypes": dtype,
        "widths": head_dim and map(shipping.widths_of, head_dim),
        "features": features and map(shipping.features_of, features),
        "cache_dtypes": cache_dtype,
    }
    wanted = shipping.Wanted(kvcache=kvcache, **{name: tuple(x) for name, x in given.items() if x})
    chosen = [architectures.by_name(name) for name in arch or [architectures.TARGET.name]]
    kernels = [(spec, architecture) for architecture in chosen for spec in wanted.specifications(architecture)]
    shipping.check_folder("FA2_CUTE_CACHE" if into is None else "--into", where, kernels)
    console = _console()
    made = shipping.compile_all(kernels, where, jobs)
    for spec, architecture in track(made, "compiling", total=len(kernels), console=console, transient=True):
        console.print(f"{architecture.target}: {spec.title}")
    console.print(f"{len(kernels)} kernels in {where.folder}")


@_command(also={"shape": "SHAPE", "q": "SHAPE"})
def trace(
    shape: Annotated[str, typer.Argument(help="BATCHxQUERY_LENxHEADSxHEAD_DIM, such as 1x256x8x128")],
    key_len: Annotated[int | None, typer.Option(help="keys; by default as many as queries")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads; by default as many as heads")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="mask keys after the query")] = False,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="of the random numbers")] = 0,
):
    """What a call's kernels do on sm_120, counted in the emulator: instructions, bank conflicts, sectors, bytes."""
    from . import trace as tracing

    problem = tracing.problem_of(shape, key_len=key_len, kv_heads=kv_heads, causal=causal, dtype=dtype)
    tracing.show(problem, seed, _console())


@_command(also={"query_len": "--seqlen"})
def explore(
    head_dim: Annotated[int, typer.Option(help="elements of a query, key and value row")] = 128,
    seqlen: Annotated[int, typer.Option(help="queries, and keys unless --key-len says otherwise")] = 4096,
    key_len: Annotated[int | None, typer.Option(help="keys; by default as many as queries")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="mask keys after the query")] = False,
    batch: Annotated[int, typer.Option(help="sequences")] = 1,
    heads: Annotated[int, typer.Option(help="query heads")] = 32,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads; by default as many as heads")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16")] = "bfloat16",
    arch: Annotated[str | None, typer.Option(help="sm_120a and the like; by default this GPU's, else sm_120a")] = None,
    vary: Annotated[
        list[str] | None, typer.Option(help="values to try, such as tile_n=32,64; repeatable; --vary help lists all")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="processes that compile; by default one a core")] = None,
    results: Annotated[Path | None, _output_option(help="file to keep results in, and to go on from")] = None,
    report: Annotated[Path | None, _output_option(help="HTML file; by default beside the results")] = None,
    time: Annotated[bool, typer.Option(help="also time the tiles where there is such a GPU")] = True,
    apply: Annotated[bool, typer.Option("--apply", help="write the winner to the file of FA2_CUTE_TUNING")] = False,
):
    """Which tile for which problem, and why: resources, instructions, predicted times, pictures; needs no GPU."""
    from .explore import command, space

    console = _console()
    if vary == ["help"]:
        console.print(command.parameters())
        return
    keys = seqlen if key_len is None else key_len
    kv_heads = heads if kv_heads is None else kv_heads
    workload = space.Workload(head_dim, seqlen, keys, causal, batch, heads, kv_heads, dtype)
    points = space.points(space.parse_vary(vary or ()))
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs: got {jobs}, takes 1 or more")
    options = {"points": points, "jobs": jobs, "file": results, "report": report, "time": time, "apply": apply}
    command.explore(workload, command.architecture(arch), console, **options)


@_command(also=_OF_TILE)
def layouts(
    head_dim: Annotated[int, typer.Option(help="elements of a query, key and value row")] = 128,
    arch: Annotated[str | None, typer.Option(help="whose tile; by default this GPU's, else sm_120a")] = None,
    tile: Annotated[str | None, typer.Option(help="such as 128x64x8x2; by default the shipped one")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16")] = "bfloat16",
    into: Annotated[Path, _output_option(help="folder for the pictures")] = Path("fa2-cute-layouts"),
    swizzle: Annotated[bool, typer.Option(help="--no-swizzle shows what it is good for")] = True,
):
    """Draw the kernel's own layouts: operands by thread, shared memory by bank, one access with its conflicts."""
    from .explore import command, space

    workload = space.Workload(head_dim, 1, 1, dtype=dtype)
    point = None if tile is None else command.parse_tile(tile)
    command.layouts(workload, command.architecture(arch), point, into, swizzle, _console())


@_command(
    also=_OF_TILE,
    epilog="Options of the prefill section: --shape, --key-len, --dtype, --tile. Of decode: --cell, --splits, --page, "
    "--heads, --head-dim. Of both: --kv-heads.",
)
def bench(
    what: Annotated[
        list[str] | None,
        typer.Argument(help="of prefill, decode, kvcache, host, compile, memory; all by default. Or: plot FILE ..."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer problems and repetitions")] = False,
    out: Annotated[Path | None, _output_option(help="the JSON file; for plot, the folder of the pictures")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="only this peer, repeatable; by default all installed")] = None,
    rounds: Annotated[int | None, typer.Option(help="interleaved repetitions of each contestant")] = None,
    minutes: Annotated[float | None, typer.Option(help="begin no problem after so long; 1 if some are left")] = None,
    jobs: Annotated[int | None, typer.Option(help="processes that compile ahead; by default one a core")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="BATCHxLENGTHxHEADSxHEAD_DIM, repeatable")] = None,
    key_len: Annotated[int | None, typer.Option(help="keys, where not as many as queries")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16")] = "bfloat16",
    tile: Annotated[list[str] | None, typer.Option(help="also time this tile, such as 128x64x8x2; repeatable")] = None,
    cell: Annotated[list[str] | None, typer.Option(help="BATCHxKEYS, repeatable")] = None,
    splits: Annotated[list[int] | None, typer.Option(help="also time so many splits, repeatable")] = None,
    page: Annotated[list[int] | None, typer.Option(help="page sizes, repeatable; by default 64, 16, 1")] = None,
    heads: Annotated[int, typer.Option(help="query heads")] = 32,
    head_dim: Annotated[int, typer.Option(help="elements of a query, key and value row")] = 128,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads; by default prefill as many as heads, decode 8")
    ] = None,
):
    """Times beside those of other attention libraries, in one run on this GPU; 1 if a section has no figures."""
    console = _console(BENCH_WIDTH)
    if what and what[0] == "plot":
        try:
            from .bench import plots
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            raise ToolMissing(
                "bench plot: needs matplotlib, which the extra 'explore' brings: pip install -e '.[explore]'"
            ) from None
        plots.draw_files([Path(file) for file in what[1:]], out, console)
        return
    from .bench.options import PAGES, Options, sections_of

    sections_of(what or ())
    options = Options(
        quick=quick,
        peer=tuple(peer or ()),
        rounds=rounds,
        minutes=minutes,
        jobs=jobs,
        out=out,
        shape=tuple(shape or ()),
        key_len=key_len,
        dtype=dtype,
        tile=tuple(tile or ()),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        cell=tuple(cell or ()),
        splits=tuple(splits or ()),
        page=tuple(page) if page else PAGES,
    )
    from .bench import command

    command.run(what or (), options, console)


@_command()
def info():
    """Versions, devices, and which kernel runs on each."""
    import torch

    from . import __version__, arch

    console = _console()
    versions = Table(title="Versions", show_header=False)
    versions.add_row("fa2_cute", __version__)
    versions.add_row("Python", platform.python_version())
    for component in COMPONENTS:
        versions.add_row(component, _version(component))
    console.print(versions)

    devices = Table(title="What runs")
    for heading in ("device", "architecture", "how"):
        devices.add_column(heading)
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        try:
            how = f"kernels compiled for {arch.by_capability(major, minor).target}"
        except ValueError as error:
            how = str(error)
        devices.add_row(f"cuda:{index} {torch.cuda.get_device_name(index)}", f"sm_{major}{minor}", how)
    devices.add_row("cpu", arch.TARGET.name, f"kernels compiled for {arch.TARGET.target}, in the emulator")
    console.print(devices)
    _print_tiles(console, torch)


def _print_tiles(console: Console, torch):
    from . import arch, tiling

    names = {arch.TARGET.name: arch.TARGET}
    for index in range(torch.cuda.device_count()):
        architecture = arch.BY_NAME.get("sm_{}{}".format(*torch.cuda.get_device_capability(index)))
        if architecture is not None:
            names[architecture.name] = architecture
    table = Table(title="Tiles")
    for heading in ("architecture", "dtype", "head_dim", "mask", "tile", "warps", "stages", "shared memory"):
        table.add_column(heading)
    for architecture in names.values():
        for spec in tiling.shipped(architecture):
            table.add_row(
                architecture.name,
                spec.dtype,
                str(spec.head_dim),
                "causal" if spec.causal else "full",
                f"{spec.tile_m} x {spec.tile_n}",
                str(spec.warps),
                str(spec.stages),
                f"{spec.shared_bytes / 1024:g} KiB",
            )
    console.print(table)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main(arguments: list[str] | None = None):
    """Entry point: runs the command and exits the process."""
    try:
        code = app(arguments, prog_name="fa2-cute", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except EXPECTED as error:
        _fail(str(error), 1)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # the command-line parser's own errors have it
        if usage is None:
            raise
        _fail(f"{usage()} (see fa2-cute --help)", 2)
    if code == 130:
        _fail("interrupted", 130)
    sys.exit(code or 0)


def _fail(message: str, code: int):
    print(f"fa2-cute: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
