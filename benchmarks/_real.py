"""Real tensors for the benchmarks: a model's attention, values and output matrices on a text of a given length."""

from __future__ import annotations

from typing import Any

import torch

import whence

# Ordinary prose with few repetitions, long enough for 512 tokens of either embedded model.
TEXT = (
    "The old doctor told the nurse that she would not leave the ward before the storm was over, because the roads to "
    "the village had been closed since noon and nobody knew when they would open again. Upstairs, two children played "
    "chess by candle light while their mother counted jars of plums, honey and salted beans on the kitchen shelves. "
    "A letter from the capital lay unopened beside the clock: it spoke of taxes, a new railway and the price of wool. "
    "Every spring the river takes a little more of the meadow, said the miller, and every autumn we build the fence "
    "again, a yard further back, as our fathers did. Nobody laughed. Outside, wind moved through the pines like a slow "
    "animal, and somewhere far below a dog began to bark at nothing. When morning came, the snow had buried the gate, "
    "the well and half of the barn; smoke rose straight from seven chimneys, blue against a sky as clean as glass. The "
    "postman arrived on skis with newspapers four days old, in which a minister promised bridges, an actress denied a "
    "rumour, and an astronomer announced that a comet would return in seventy six years. They read all of it aloud. "
    "Later the teacher explained why ice floats, how bees find their way home, and what the word parliament means; the "
    "youngest asked whether fish can hear thunder. By evening the plough had reached the crossroads, engines coughing, "
    "lamps yellow in the dusk, and with it came bread, medicine, oranges and a stranger who carried a violin case. He "
    "said little, paid for his soup with foreign coins, and slept in the chair nearest to the stove. At midnight he "
    "rose and played so quietly that those who woke believed, for a moment, they were still asleep and dreaming. "
)


def tensors(name: str, n: int) -> dict[str, Any]:
    """attention (heads, n, n), values (heads or kv heads, n, d_v), output (heads, d_v, d), the trace and its forward."""
    model = whence.load(name)
    ids = dict(model.tokenizer(TEXT * 3, return_tensors="pt", truncation=True, max_length=n))
    found = whence.trace(model, ids)

    def forward() -> Any:
        model.model.set_attn_implementation("eager")
        with torch.no_grad():
            return model.model(**ids, output_attentions=True, use_cache=False)

    return {
        "attention": found.attention.flatten(0, 1),
        "values": found.values.flatten(0, 1),
        "output": torch.cat([layer.projection.weight for layer in found]),
        "outputs": found.outputs.flatten(0, 1),
        "trace": found,
        "forward": forward,
    }
