"""Where the vLLMs that the settings start here run: which GPUs each one has, and whether it fits into them.

Every base model has a vLLM of its own in every generator of that kind, and no GPU belongs to two of them. They take the
GPUs in order, from the generator's device on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from store.settings import Settings, SettingsError
from workers.model.card import ModelCard
from workers.model.planning.check import check_model
from workers.model.planning.plan import MOST_SLOTS, Device, DoesNotFit, gib
from workers.model.planning.vllm_options import OPTIONS, BadOption, Layout, checked
from workers.model.planning.vllm_plan import UTILIZATION, check_layout, plan_vllm

#: How much CPU memory vLLM's processes take beside weights, keys and values.
CPU_PROCESS_BYTES = 1280 << 20


def options_of(settings: Settings) -> dict[str, object]:
    """vLLM's options from the settings. Raises SettingsError."""
    try:
        return checked(settings.generator.vllm.options)
    except BadOption as error:
        raise SettingsError(str(error)) from None


def started_here(settings: Settings, alone: str = "") -> int:
    """The generators whose vLLM is started here; with `alone`, only the worker of that role."""
    kinds = settings.generator.kinds[:1] if alone else settings.generator.kinds
    if alone == "trainer":
        return 0
    return max(0, kinds.count("vllm") - len(settings.generator.vllm.urls))


def gpus_of(settings: Settings, models: Sequence[str], number: int) -> dict[str, list[int]]:
    """The GPUs of each model's vLLM, in the `number`-th generator (from 0) whose vLLM is started here."""
    _, _, first = settings.generator.device.partition(":")
    each = Layout.of(options_of(settings)).gpus
    begin = int(first or 0) + number * each * len(models)
    return {name: list(range(begin + i * each, begin + (i + 1) * each)) for i, name in enumerate(models)}


def taken_bytes(device: Device, settings: Settings, cards: Mapping[str, ModelCard], alone: str = "") -> int:
    """How many bytes the vLLMs take of a device that other workers use, too."""
    count, options = started_here(settings, alone), options_of(settings)
    if not count:
        return 0
    if device.kind == "cpu":
        dtype = "float32" if settings.generator.dtype == "auto" else settings.generator.dtype
        weights = sum(check_model(card, dtype).weight_bytes for card in cards.values())
        each = settings.generator.vllm.kv_bytes + CPU_PROCESS_BYTES
        return count * (weights + len(cards) * Layout.of(options).gpus * each)
    share = float(str(options.get("gpu_memory_utilization", UTILIZATION)))
    owned = {gpu for k in range(count) for gpus in gpus_of(settings, list(cards), k).values() for gpu in gpus}
    return int(share * device.size_bytes) if device.name in {f"cuda:{gpu}" for gpu in owned} else 0


def vllm_tables(
    settings: Settings, cards: Mapping[str, ModelCard], gpu_bytes: Sequence[int], alone: str = ""
) -> list[str]:
    """For people: what each model's vLLM takes of each of its GPUs. Raises DoesNotFit, also if there are too few
    GPUs."""
    count, options = started_here(settings, alone), options_of(settings)
    for card in cards.values() if count else ():
        check_layout(card.config, Layout.of(options))
    if count and not gpu_bytes and (needy := [name for name in options if not OPTIONS[name].cpu]):
        raise DoesNotFit(f"generator.vllm.options.{needy[0]} needs a GPU, and there is none here (docs/vllm.md)")
    if not count or not gpu_bytes:
        return []
    each, models = Layout.of(options).gpus, list(cards)
    last = max(gpus_of(settings, models, count - 1)[models[-1]])
    if last >= len(gpu_bytes):
        first = gpus_of(settings, models, 0)[models[0]][0]
        raise DoesNotFit(
            f"generator.vllm: {count} x {len(models)} vLLM of {each} GPUs take cuda:{first} to cuda:{last}, and there "
            f"are {len(gpu_bytes)} GPUs: set [generator.vllm.options] tensor_parallel_size, or fewer replicas"
        )
    found = []
    for number in range(count):
        for name, gpus in gpus_of(settings, models, number).items():
            smallest = min(gpus, key=lambda gpu: gpu_bytes[gpu])
            device = Device(f"cuda:{smallest}", gpu_bytes[smallest], each)
            found.append(vllm_table(settings, cards[name], device))
    return found


def vllm_table(settings: Settings, card: ModelCard, device: Device) -> str:
    """The same for one model. Raises DoesNotFit."""
    vllm, generator = settings.generator.vllm, settings.generator
    dtype = "bfloat16" if generator.dtype == "auto" else generator.dtype
    parts = plan_vllm(
        check_model(card, dtype),
        device,
        options_of(settings),
        adapters=vllm.max_adapters,
        rank=vllm.max_rank,
        context=min(generator.context_tokens, card.context_length),
        slots=generator.slots or MOST_SLOTS["cuda"],
    )
    of = f"vLLM of {card.name}, on {device.count} x {device.name}, each"
    lines = [of, f"{'':<32}{gib(device.size_bytes):>12}"]
    return "\n".join([*lines, *(f"{part.name:<32}{gib(part.size_bytes):>12}  {part.note}".rstrip() for part in parts)])
