"""Is this token still itself? Token identifiability through the layers (Brunner et al., ICLR 2020, section 4).

The mathematics is in small files on tensors: `split`, `nearest`, `closed_form`, `training`, `intervals`. Around them,
`states` runs the model once, `candidates` and `measurement` go through layers and maps, `token_identifiability` is the
function to call, `result` holds and shows what came out.
"""
