"""The mistakes that can be named: one table, used by the checker, its tests, `headwise check --list` and the quiz.

To add a mistake, add a row here and a function that finds it to `faults/`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

ORDER = ("wrong", "fragile", "slow", "style")


class Mistake(NamedTuple):
    """A named mistake. `title` says what is wrong, `why` what that does, `hint` one next step, never the solution."""

    name: str
    severity: str  # wrong, fragile, slow, style
    title: str
    why: str
    hint: str
    explains: tuple[str, ...] = ()  # mistakes that need not be reported beside this one
    step: str = ""  # the step of the reference (a field of `Recipe`) that it changes
    whole: bool = False  # only a complete layer makes it: a single head, which is part of one, does not
    certain: bool = False  # it is certain even where no call gave a result
    symptom: bool = False  # another mistake may cause it: beside one, it is left out until that one is mended


M = Mistake
_ROWS = (
    # scores
    M("scale-missing", "wrong", "scores are not scaled",
      "A dot product of D terms grows like √D. Without the division the softmax saturates and gradients vanish.",
      "Divide the scores by the square root of the head width before the softmax.", step="scale"),
    M("scale-d_model", "wrong", "scores are divided by the square root of the model width",
      "Each score is a sum over the D numbers of one head, not over the E numbers of the model.",
      "Check which width the query has at the moment of the product.", step="scale"),
    M("scale-batch", "wrong", "scores are scaled by the batch size",
      "The same token then gets other weights when it is computed together with more samples.",
      "Read the width from the last axis of one head's query, q, not from its first.", step="scale",
      explains=("batch-leak", "dropout-biased")),
    M("scale-length", "wrong", "scores are scaled by the sequence length",
      "The scale must not depend on the text: the sum in a score runs over the head width.",
      "Read the width from the last axis of one head's query, q.", step="scale", explains=("cross-length",)),
    M("scale-multiplied", "wrong", "scores are multiplied by √D instead of divided",
      "This spreads the scores where they should be narrowed, and the softmax saturates.",
      "Check the direction: wider heads need smaller scores.", step="scale"),
    M("scale-no-sqrt", "wrong", "scores are divided by D instead of √D",
      "The scores shrink too far and every head becomes nearly uniform.",
      "The spread of a sum of D products grows with the square root of D.", step="scale"),
    M("scale-other", "wrong", "scores have a scale other than 1/√D",
      "The scale is part of the function: weights trained with the usual scale would give other results here.",
      "Compare the number you divide by with the square root of the head width.", step="scale"),
    M("scale-after-softmax", "wrong", "the scale is applied after the softmax",
      "Rows then no longer sum to one, and the softmax itself still sees unscaled scores.",
      "Move the scaling to before the softmax.", step="after_factor", explains=("scale-missing",)),
    M("scores-activated", "wrong", "an activation is applied to the scores",
      "Scores may be negative: an activation gives keys that do not fit the same weight as keys that fit a little.",
      "Pass the scaled scores to the softmax as they are."),
    M("softmax-twice", "wrong", "the softmax is applied twice",
      "The second softmax of numbers between 0 and 1 makes the weights nearly uniform.",
      "Keep one softmax between the scores and the values."),
    M("softmax-missing", "wrong", "there is no softmax",
      "Raw scores meet the values: weights can be negative and of any size, and rows do not sum to one.",
      "Apply a softmax over the keys to the scaled scores before they meet the values.", explains=("dropout-unused",)),
    M("rotary-axis", "wrong", "queries and keys are rotated by head, not by position",
      "The table of angles was lined up with another axis than the tokens, so no token knows its position.",
      "Line up the table with the token axis: print both shapes where they are multiplied."),
    M("rotary-one-side", "wrong", "only the queries or only the keys are rotated",
      "A score then depends on the absolute position instead of the distance.",
      "Rotate queries and keys in the same way."),
    M("rotary-absolute", "wrong", "the rotation depends on the position, not only on the distance",
      "Two tokens that both move by one position get a different score, so they are not rotated by their angles.",
      "Rotate every pair (a, b) to (a cos - b sin, a sin + b cos), with the same tables for queries and keys."),
    M("rotary-offset", "wrong", "queries and keys are rotated by different positions",
      "A token is then at a distance from itself.", "Use the same rows of the table for queries and keys."),
    M("rotary-angle", "wrong", "queries and keys are not rotated by the angles in the table",
      "The rotation is applied twice, or to another part than the table was made for.",
      "Rotate queries and keys once each."),
    M("rotary-values", "wrong", "the values are rotated by position",
      "Only scores should depend on positions. Rotated values make the result depend on where the text starts.",
      "Rotate queries and keys, and leave the values as they are."),
    M("bias-sign", "wrong", "the bias by distance has the wrong sign",
      "ALiBi subtracts a multiple of the distance, so that near tokens get more weight.",
      "Compare the bias of a near key with that of a far one."),
    M("bias-view", "wrong", "the bias by position is reshaped where its axes should be permuted",
      "A view keeps the order of the numbers, so that a head gets the biases of other heads and positions.",
      "Move the axis of the heads to the front instead of reshaping the table."),
    M("bias-heads", "wrong", "the bias by position is the same in every head",
      "There is a number for each head, so that heads can look near and far; here they all look the same way.",
      "Line up the axis of the heads in the table with that of the scores."),
    M("bias-slopes", "wrong", "the slopes are not those of ALiBi",
      "With H heads, head h has the slope 2 to the power of -8h/H, counted from one.",
      "Check where the exponent starts, and what it is divided by."),
    M("bias-constant", "wrong", "the bias by position has no effect",
      "A number that is added to all scores of a row changes nothing after the softmax.",
      "Print the index into the table for the last query: check the sign of the distance, and where it is cut off."),
    M("bias-wraps", "wrong", "the bias by position wraps around",
      "An index below zero counts from the end of the table, so that far keys on one side get the bias of the other.",
      "Cut the distance off at both ends before it becomes an index."),
    M("softmax-axis", "wrong", "the softmax runs over the wrong axis",
      "A query's weights over all keys must sum to one. Along another axis, tokens compete that should not.",
      "Find out which axis of the scores counts keys.", step="axis",
      explains=("mask-transposed", "mask-on-queries", "mask-empties-rows", "mask-leaks", "mask-nan",
                "mask-wrong-sample", "mask-some-heads", "mask-raises", "mask-ignored")),
    # heads
    M("split-view", "wrong", "heads are split by a view where a transpose is needed",
      "A view reads the same numbers in the same order, so a head is filled with pieces of other tokens.",
      "Split the last axis into (heads, width) first, then move the heads in front of the tokens.",
      step="split"),
    M("tokens-view", "wrong", "channels and positions are mixed up by a view",
      "A view reads the same numbers in the same order: with the channels in front, a token becomes a piece of one "
      "channel.",
      "Flatten the positions first, then move the channels to the end: x.flatten(2).transpose(1, 2).",
      explains=("merge-view", "influence", "residual-scaled", "batch-leak")),
    M("merge-view", "wrong", "heads are merged by a view where a transpose is needed",
      "A token's output is then assembled from the heads of other tokens.",
      "Move the heads back behind the tokens before you flatten.", step="merge"),
    M("attends-over-heads", "wrong", "attention runs between the heads of one token, not between tokens",
      "The head axis is where the token axis belongs in the products, so no token sees another.",
      "Move the heads in front of the tokens before the first product.", explains=("mask-ignored", "mask-crashes")),
    M("attends-over-features", "wrong", "attention runs between the numbers of a head, not between tokens",
      "The table has a row and a column for every number of a head, so no token is compared with another.",
      "Sum over the head width in the product of queries and keys.", explains=("mask-ignored", "mask-crashes")),
    M("attends-over-batch", "wrong", "attention runs between the samples of a batch",
      "Unrelated samples are mixed.",
      "Check which axis is the batch in the tensors of the first product."),
    M("batch-second", "wrong", "batch and tokens are mixed up",
      "The first axis is read as the tokens, so the samples of a batch attend to each other.",
      "Check the order in which the axes of the input are unpacked."),
    M("batch-leak", "wrong", "one sample's result depends on the other samples of the batch",
      "Samples must be independent; here, changing one changes another.",
      "Look for a view, repeat or softmax that crosses the first axis.", symptom=True, explains=("dropout-biased",)),
    M("heads-share-weights", "wrong", "all heads use the same weights",
      "Heads that read the same queries, keys or values can tell nothing that one of them does not tell.",
      "Make a new layer for each head of a list, or give each head its own slice of one wide projection."),
    M("heads-overlap", "wrong", "heads take overlapping slices of the projection",
      "Neighboring heads then share most of their numbers, and other rows of the projection are never used.",
      "Give head h the columns from h·D to (h + 1)·D.", explains=("unused-projection", "heads-share-weights")),
    M("heads-averaged", "wrong", "heads are added up instead of concatenated",
      "What the heads found can no longer be told apart, and a projection cannot weigh them separately.",
      "Concatenate the heads along the last axis.", explains=("form-width",)),
    M("single-head", "wrong", "the number of heads is accepted but not used",
      "The full width is one head, so there is only one attention pattern.",
      "Split queries, keys and values into heads.", whole=True),
    M("output-width", "wrong", "the output is not as wide as asked for",
      "It cannot be added to the input, and the next layer refuses it.", "Check the sizes of the output projection."),
    M("head-width", "wrong", "heads do not have the width that was asked for",
      "The width of the projections is not the number of heads times the width of one.",
      "Compute the width of the projections from heads and head width.", explains=("scale-other",)),
    M("output-shape", "wrong", "the axes of the output are in a different order from those of the input",
      "The next layer reads the output as (batch, tokens, width).",
      "Print the shape before the heads are merged, and check the order in which sizes are unpacked.", certain=True),
    M("joined-axis", "wrong", "heads are joined along the wrong axis",
      "Each token needs one row with all heads side by side, not more rows, more samples or a new axis.",
      "Join the heads along the last axis: torch.cat with dim=-1.", certain=True),
    M("heads-lost", "wrong", "not as many heads are computed as were asked for",
      "Some heads are left out or counted twice.", "Check the range of the loop, or the sizes of the split."),
    M("heads-overwritten", "wrong", "some numbers of the heads do not reach the output",
      "Heads are written over each other, or only a part of each is kept.",
      "Write head h to the columns from h·D to (h + 1)·D."),
    M("heads-chained", "wrong", "each head reads the output of the one before it",
      "Heads look at the same input side by side. In a chain, only the first one sees it, and only the last one's "
      "result is returned.",
      "Call every head with the input itself, and put the results side by side.",
      explains=("no-out-proj", "heads-overwritten", "too-wide", "form-width")),
    M("no-out-proj", "wrong", "no output projection is applied",
      "The concatenated heads are never mixed; the paper's W_O is missing.",
      "Pass the concatenated heads through one more linear layer.", whole=True),
    M("no-qkv-proj", "wrong", "queries, keys and values are not projected",
      "Without weights of their own, heads cannot learn what to look for.",
      "Make three learned projections of the input."),
    M("one-projection", "wrong", "queries, keys and values do not each have a projection of their own",
      "What a token looks for, what it offers and what it passes on are three things; one matrix cannot learn two.",
      "Use three different weight matrices."),
    M("wrong-role", "wrong", "a projection or an input is used in the wrong role",
      "Queries ask, keys are compared with them, values are passed on: swapped, it computes something else.",
      "Follow query, key and value by name from the argument to the products.",
      explains=("one-projection", "causal-inverted", "softmax-axis", "projected-twice")),
    M("scores-transposed", "wrong", "the scores are transposed (keys × queries)",
      "A row of the scores belongs to a query, and its weights say which keys it reads. Transposed, every token asks "
      "with its key and is found by its query.",
      "Let the queries come first in the product of queries and keys, or first among the letters of its result.",
      explains=("wrong-role", "one-projection", "causal-inverted", "softmax-axis", "mask-transposed",
                "projected-twice")),
    M("weights-transposed", "wrong", "the weights are transposed when they meet the values",
      "A row of weights belongs to a query. Transposed, every token hands out its value instead of collecting values.",
      "Sum over the axis of the keys in the product of weights and values.",
      explains=("softmax-axis", "wrong-role", "causal-inverted", "mask-transposed")),
    M("attention-unused", "wrong", "the result does not use the attention",
      "Weights and heads are computed, but what is returned is made from something else.",
      "Follow the result back from the return: it must come from the product of weights and values.",
      explains=("tokens-alone", "dropout-unused")),
    M("projected-twice", "wrong", "a projection is applied twice",
      "The input passes through two layers, one after the other, where one projection was meant.",
      "Follow the name of the input through forward: what was projected must not be projected again."),
    M("out-proj-per-head", "wrong", "the output projection is applied to every head separately",
      "Heads are never mixed: the output's slice for one head depends on that head alone.",
      "Concatenate the heads first, then apply one projection of the full width.", explains=("output-width",)),
    M("values-scaled", "wrong", "values or output are multiplied by a number",
      "Only the scores have a scale. Another factor changes every result.",
      "Look for a division or multiplication outside the scores."),
    M("projection-activated", "wrong", "an activation follows one of the projections",
      "Queries, keys and values are linear maps of the input; an activation on one of them cuts off a part of it.",
      "Use the result of the projection as it is."),
    M("bias-foreign", "wrong", "a bias is added to the wrong projection",
      "The bias of one of query, key and value ends up in another.",
      "Take the weight and the bias of every projection from the same place."),
    M("bias-subtracted", "wrong", "a bias is subtracted",
      "A checkpoint from a standard layer gives different results here.", "Add the bias."),
    M("bias-repeated", "wrong", "a bias is added several times",
      "Every head adds the bias of the output projection, which belongs to the result once.",
      "Add the heads' parts without a bias, and the bias once."),
    M("residual-scaled", "wrong", "the input is added to the output with a factor other than one",
      "A residual connection adds the input once.", "Look for a second addition of the input, or a factor on it."),
    M("unused-projection", "wrong", "a projection is created and never used",
      "Its weights have no effect on the result, so the step it was made for is missing.",
      "Search forward for the name of this layer.", explains=("dead-parameter",), symptom=True),
    M("too-wide", "wrong", "the output is wider than asked for",
      "Every head has the full output width, so concatenation multiplies it by the number of heads.",
      "Make each head as wide as the output divided by the number of heads.", whole=True, explains=("no-out-proj",)),
    # masks
    M("mask-ignored", "wrong", "the mask has no effect",
      "A mask is accepted, but the result is the same with and without it.",
      "Follow the mask argument: it must change the scores before the softmax.",
      explains=("form-mask",)),
    M("mask-discarded", "wrong", "the result of masking is thrown away",
      "`masked_fill` returns a new tensor; unless it is assigned, the scores stay as they were.",
      "Assign the result, or use the in-place variant.", explains=("form-mask", "mask-ignored", "causal-ignored")),
    M("mask-after-softmax", "wrong", "the mask is applied after the softmax",
      "The hidden keys still took their share of the row, so the visible weights no longer sum to one.",
      "Mask the scores before the softmax.", step="masked_after",
      explains=("form-mask", "mask-ignored", "mask-leaks", "mask-nan", "nan-in-training", "half-fails")),
    M("mask-on-values", "wrong", "the mask is applied to the values",
      "Hidden keys give nothing, but still take their share of every row, so that the visible weights sum to less "
      "than one.",
      "Mask the scores before the softmax.", explains=("form-mask", "mask-ignored")),
    M("bias-after-softmax", "wrong", "something is added to the weights after the softmax",
      "The rows no longer sum to one, and what is added is not weighed against the scores.",
      "Add it to the scores, before the softmax.", explains=("mask-leaks", "mask-ignored", "form-mask")),
    M("mask-wrong-sample", "wrong", "the mask reaches the wrong sample or head",
      "The axis of the mask that counts samples meets the heads, or heads that were folded into the batch in another "
      "order.",
      "Write down the axes of the mask and of the scores: the new axis of size 1 belongs where the heads are.",
      explains=("form-mask",)),
    M("mask-leaks", "wrong", "masked keys keep some weight",
      "A hidden score must be far below every other: 0 counts as exp(0) = 1 in the softmax, and -20 can be reached.",
      "Fill hidden scores with minus infinity.",
      explains=("form-mask", "causal-ignored")),
    M("mask-crashes", "wrong", "passing a mask raises an error",
      "A mask of this kind does not fit what the code does with it.",
      "Call the layer once with a mask of the shape you intend.", explains=("form-mask", "mask-wrong-sample")),
    M("mask-transposed", "wrong", "the mask is transposed: it is read as keys × queries",
      "A row of the mask belongs to a query. Transposed, a causal mask shows the future and hides the past.",
      "Compare the axes of the mask with those of the scores: queries come first, keys last.",
      explains=("form-mask",)),
    M("mask-on-queries", "wrong", "a mask of keys is applied to queries",
      "Padding must be hidden from every query. Here rows are hidden instead, and padding still gets weight.",
      "Give the mask a shape in which its last axis meets the keys, such as (B, 1, 1, S).",
      explains=("form-mask",)),
    M("mask-empties-rows", "wrong", "a mask of keys also hides whole rows",
      "A padded query sees no key, so its softmax is NaN, which the next layer spreads to every token.",
      "Hide keys only: padded queries may see the real ones, and what they give is ignored.",
      explains=("form-mask",)),
    M("mask-some-heads", "wrong", "the mask does not reach every head",
      "Some heads attend to hidden keys.", "Check how the mask is broadcast or indexed along the head axis.",
      explains=("form-mask",)),
    M("mask-turned", "wrong", "the mask means the opposite in some heads",
      "Hidden keys are seen there, and visible ones are hidden.",
      "Invert the mask once, before a loop over heads, and under another name.", explains=("form-mask",)),
    M("mask-integers", "fragile", "a mask of whole numbers does something else than one of booleans",
      "The operator ~ turns True into False, but 1 into -2 and 0 into -1, and both of these count as True.",
      "Compare it with 0, or convert it by mask.bool() first."),
    M("mask-replaces-causal", "wrong", "with a mask, the causal mask is no longer applied",
      "Padding is hidden, but tokens see the future.", "Apply both masks: a key must be visible in each."),
    M("mask-off-by-one", "wrong", "one key too many or too few is visible",
      "A length counts the real keys: with length n, keys 0 to n - 1 are visible.",
      "Check whether the comparison needs < or <=."),
    M("mask-scaled", "wrong", "the mask is scaled together with the scores",
      "A mask that is added before the division loses part of its size, so a bias in it has another effect.",
      "Scale the scores first, then add the mask."),
    M("mask-rescales", "wrong", "with a mask, the visible keys get different weights",
      "A mask only hides keys. The scores of the others must stay as they are without it.",
      "Compare the branch with a mask to the one without: something else happens there, such as a second scaling.",
      symptom=True),
    M("mask-raises", "wrong", "the mask raises scores instead of lowering them",
      "A large positive number in place of a score gives that key the whole row.",
      "Fill hidden scores with minus infinity: check the sign.",
      explains=("form-mask",)),
    M("mask-nan", "wrong", "a mask makes the result NaN",
      "The scores hold something that is not a number: 0 times infinity is NaN, and so is infinity minus infinity.",
      "Fill the hidden scores with minus infinity instead of multiplying or adding it everywhere.",
      explains=("form-mask",)),
    M("mask-hides-all", "wrong", "the built-in mask hides every key from some queries",
      "A query that sees no key gives NaN or an average over hidden keys. With a causal mask each token sees itself.",
      "Print the mask as it is applied: no row may hide every key.", explains=("mask-nan",)),
    M("mask-content-ignored", "wrong", "every mask has the same effect",
      "Passing a mask changes the result, but what the mask says does not matter.",
      "Use the values of the mask, not only whether there is one.",
      explains=("form-mask",)),
    M("masks-combined", "wrong", "two masks together do not hide what each hides alone",
      "A key must be hidden if either mask hides it.",
      "Combine the masks before the softmax: a key is visible only where both show it."),
    M("causal-inverted", "wrong", "the causal mask is inverted: tokens see the future and not the past",
      "The future does not exist during generation, and during training it gives the answer away.",
      "Print the mask as it is applied: each row is a query, and the keys that it hides must be those after the query.",
      explains=("form-mask", "bias-sign", "mask-nan", "mask-hides-all", "nan-in-training")),
    M("causal-off", "wrong", "the causal mask is never switched on",
      "The token to predict is in the input, so training succeeds without learning anything.",
      "Switch the causal mask on where the layer is made, or by default."),
    M("causal-off-by-one", "wrong", "the causal mask is off by one",
      "A token must see itself and everything before it, and nothing after.",
      "Check the diagonal argument of tril or triu.",
      explains=("form-mask",)),
    M("causal-ignored", "wrong", "the causal mask has no effect",
      "A token's result depends on tokens after it.", "Print the weights: there must be zeros above the diagonal.",
      explains=("form-mask",)),
    M("causal-some-lengths", "wrong", "the causal mask is right for some lengths only",
      "A stored mask is sliced at the wrong place, or its size is taken from something else than the input.",
      "Slice the stored mask to the length of the input on both axes."),
    M("window-size", "wrong", "the window of visible keys is not as wide as the file says",
      "A token sees more or fewer of the tokens before it than described.",
      "Count the keys that the last query sees, itself included."),
    M("mask-convention", "wrong", "the mask means the opposite of what the file says about it",
      "Callers who pass a mask as described hide visible keys, or add ones and zeros to the scores.",
      "Compare the comment with the line that applies the mask.",
      explains=("form-mask",)),
    M("mask-misplaced", "wrong", "the mask is passed to another parameter of the function",
      "By position it lands in a parameter before the one called mask, and is used as something else.",
      "Pass it by name: mask=mask."),
    # running
    M("dropout-in-eval", "wrong", "dropout is active in evaluation mode",
      "Two calls with the same input give different results after `eval()`.",
      "Make an nn.Dropout in __init__ and call it in forward, or pass training=self.training to F.dropout."),
    M("dropout-on-scores", "wrong", "dropout is applied before the softmax",
      "A score set to zero is not dropped: it gets the weight exp(0). A hidden score becomes NaN: -inf times 0.",
      "Apply dropout to the weights, after the softmax.", explains=("nan-in-training",)),
    M("dropout-twice", "fragile", "one of several dropout rates acts in two places",
      "On average nothing changes, but more is dropped than the rate says, and another rate may have been meant.",
      "Use each rate of the constructor in one place."),
    M("dropout-rate", "wrong", "dropout acts at another rate, or in another place, than its argument says",
      "Whoever sets the rate gets more or less dropout than asked for, or gets it elsewhere.",
      "Follow each rate from the constructor to the layer that uses it."),
    M("dropout-biased", "wrong", "dropout changes the average",
      "What is left must be divided by 1 - p, so that training and evaluation agree on average.",
      "Use nn.Dropout, which does this.", symptom=True),
    M("nan-in-training", "wrong", "training mode gives NaN",
      "The loss becomes NaN at the first step.", "Call it once after train() and look for the first NaN."),
    M("training-differs", "wrong", "training and evaluation mode compute different things",
      "With dropout switched off, both modes must give the same result.",
      "Look for self.training, and for the branch that it takes.", symptom=True),
    M("remembers-calls", "wrong", "a second call with the same input gives another result",
      "The first call left something behind that the next one uses.",
      "Look for assignments to self in forward.", explains=("size-fixed", "cross-length", "gradient-cut")),
    M("input-modified", "wrong", "a call changes its own input",
      "Code that uses the tensor afterwards, such as a residual connection, gets different numbers.",
      "Replace the in-place operation with one that returns a new tensor.", explains=("remembers-calls",)),
    M("result-unused", "wrong", "something is computed and never used",
      "A result is computed and then discarded, so it has no effect on the output.",
      "Use the result in the lines that follow, or remove the line."),
    M("table-unused", "wrong", "a stored table is never used",
      "The constructor stores it for a method that nothing calls, so the step that it was made for is missing.",
      "Call the method in forward, or remove both."),
    M("mask-unused", "wrong", "a mask is made and never used",
      "A queries × keys mask is computed, but it changes no score.",
      "Pass it to masked_fill, or add it to the scores, before the softmax."),
    M("option-ignored", "wrong", "an optional argument has no effect",
      "Setting it does not change the result.", "Follow the argument through the constructor and forward."),
    M("option-crashes", "wrong", "an optional argument raises an error",
      "This path was never run.", "Call it once with this argument.", explains=("mask-ignored", "mask-crashes")),
    M("cache-differs", "wrong", "with a cache the result differs",
      "Tokens given one after another must get the same result as all at once.",
      "Print the keys after two steps: they must be those of all tokens, in order."),
    M("causal-cache", "wrong", "with a cache, the causal mask hides the wrong keys",
      "A new token must see all tokens in the cache and itself; its row in the mask starts after them.",
      "Number the queries from the length of the cache, not from zero.", explains=("cache-differs",)),
    M("paths-differ", "wrong", "asking for the weights changes the output",
      "There are two ways through the code, and they do not compute the same attention.",
      "Compare both ways step by step: scale, masks and dropout must be the same in each."),
    M("weights-returned", "wrong", "the returned weights are not the weights that were used",
      "Rows of attention weights sum to one, and the output is made with exactly these.",
      "Return the tensor that is multiplied with the values."),
    M("weights-detached", "wrong", "the returned weights are cut off from the gradient",
      "A loss on the attention weights, or a gradient through them, gets nothing.",
      "Return the weights themselves, without detach(), .data or no_grad."),
    M("layers-in-forward", "wrong", "layers are created in forward",
      "Their weights are new and random at every call, and no optimizer ever sees them.",
      "Create layers in __init__ and only use them in forward.",
      explains=("dropout-in-eval", "dropout-unused", "half-fails", "no-gradient", "slow",
                "mask-content-ignored", "gradient-cut", "remembers-calls")),
    M("buffer-not-sliced", "wrong", "the stored mask is not sliced to the length of the input",
      "Only inputs of exactly the maximum length run.", "Use the first T rows and columns of the stored mask."),
    M("size-fixed", "wrong", "it works for one size only",
      "A number is written into the code, or one size is used in the place of another that happened to be equal.",
      "Compute every size from the constructor's arguments or from the input.", symptom=True),
    M("chunks-differ", "wrong", "the result depends on the number of tokens that are computed at once",
      "Chunks only save memory: with any chunk size, every token must get the same result.",
      "Follow the second chunk: its positions start where the first one ends, and running sums must be carried over."),
    M("widths-confused", "wrong", "input width and output width are confused",
      "It works only if both are equal.", "Check for every layer which width goes in and which comes out."),
    M("reads-globals", "wrong", "a size is read from outside the class",
      "A variable of the module or of another cell need not be the size of this input, or of this object.",
      "Read sizes from the shape of the input, or keep the constructor's arguments in self."),
    M("undefined-name", "wrong", "a name is used that was never defined",
      "It is misspelled, or it exists only where other code defines it, such as an earlier cell of a notebook.",
      "Compare its spelling with the lines above; read sizes from the tensors.", certain=True),
    M("used-before-set", "wrong", "a name is used before it has a value",
      "A name that a function assigns somewhere is its own, and has no value before that line has run.",
      "Use the argument that was meant, or assign the name on every path that leads here.", certain=True),
    M("missing-attribute", "wrong", "an attribute is used that was never set",
      "`self.…` is read in forward but not assigned in __init__, or is spelled differently there.",
      "Compare the names in __init__ and forward letter by letter.", certain=True),
    M("imports-itself", "wrong", "the file imports a name from itself",
      "The import runs the file again, which is not finished then, so it raises an ImportError.",
      "Remove the import, or give the file another name.", certain=True),
    M("missing-import", "wrong", "an import is missing",
      "The file does not run as it is.", "Add the import at the top.", certain=True),
    M("missing-super", "wrong", "`super().__init__()` is not called",
      "nn.Module cannot register layers before it is initialized.",
      "Make it the first line of __init__.", certain=True),
    M("missing-base", "wrong", "the class does not inherit from nn.Module",
      "Its layers are not registered: it cannot be called like a layer, and it has no parameters() and no train().",
      "Write the base class after the name: class …(nn.Module).", certain=True,
      explains=("missing-attribute", "undefined-name")),
    M("contiguous", "wrong", "a view of a transposed tensor raises an error",
      "After a transpose the tensor is no longer contiguous, so `view` raises an error.",
      "Call contiguous() first, or use reshape."),
    M("result-dropped", "wrong", "the result of a call is thrown away",
      "Methods such as reshape return a new tensor and leave the old one as it is.",
      "Assign the result to the name that the next line reads.", certain=True),
    M("no-return", "wrong", "forward returns nothing",
      "The caller gets None.", "Return the result of the output projection.", certain=True),
    M("tokens-alone", "wrong", "no token sees another",
      "Attention lets tokens read from each other; here each output depends only on its own token.",
      "Print the shape of the weights: the last two axes must both be token axes."),
    M("weights-summed", "wrong", "the weights do not weigh the values",
      "The keys of the weights and of the values are one axis. If each is summed alone, every value counts the same.",
      "Give the key axis one name in both operands of the product, as in 'bhqk,bkhd->bqhd'."),
    M("sees-a-part", "wrong", "a token sees only a part of the sequence",
      "The sequence is cut into pieces that never attend to each other, and the name of the class does not say so.",
      "Look for a chunk, split or view that cuts the token axis where heads were meant."),
    M("influence", "wrong", "a token affects an output it must not, or fails to affect one it should",
      "The weights say who reads from whom; here information takes some other path, or is lost.",
      "Change one token of the input and look at which outputs change."),
    M("crashes", "wrong", "it raises an error",
      "The call ends before there is a result.", "Start with the line named here and print the shapes before it.",
      symptom=True),
    M("not-called", "wrong", "a layer or method is named, but not called",
      "Without parentheses, the name stands for the layer itself, not for what it computes.",
      "Write the argument in parentheses behind the name.", certain=True),
    M("trailing-comma", "wrong", "a comma at the end of a line makes a tuple",
      "Python reads `a = b,` as a tuple with one element, which is neither a tensor nor a layer nor a number.",
      "Remove the comma.", certain=True),
    M("not-callable", "wrong", "something is called that is neither a layer nor a function",
      "Parentheses behind a name call it, and a number or a tensor cannot be called.",
      "Assign the layer itself where it is made, such as nn.Dropout(dropout), or leave out the parentheses.",
      certain=True),
    M("parts-count", "wrong", "there are more or fewer parts than names for them",
      "Every part on the right of = needs one name on its left.",
      "Compare the shape with the names; where a tensor is cut, also the axis and the size of a part."),
    M("helper-no-return", "wrong", "a method returns nothing", "Whoever calls it gets None.",
      "Return the result in its last line.", certain=True),
    M("wrong-arguments", "wrong", "a function is called with other arguments than it takes",
      "Python matches arguments with parameters by their places or their names, before the function runs.",
      "Compare the call with the definition of the function.", certain=True),
    M("list-for-tensor", "wrong", "a list of tensors is used as one tensor",
      "A layer takes one tensor; a list of heads has to be joined first.",
      "Join the list along its last axis: torch.cat(…, dim=-1).", certain=True),
    M("einsum-letters", "wrong", "an equation of einsum does not fit the axes of a tensor",
      "Every axis of a tensor has one letter in the equation.",
      "Write down the axes of each tensor, and compare the letters before and after the arrow of the line named here."),
    M("layer-width", "wrong", "a layer gets an input of another width than it was made for",
      "A linear layer multiplies the last axis of its input with its weights, so both must be equally wide.",
      "Print the shape of the input of this layer.", symptom=True),
    M("missing-self", "wrong", "a method does not take self",
      "Python passes the object itself as the first argument, so that it ends up in the parameter for the input.",
      "Write self as the first parameter of the method named here.", certain=True,
      explains=("missing-attribute", "undefined-name", "crashes")),
    M("misspelled-method", "wrong", "the name of a special method is misspelled",
      "Python and PyTorch call these methods by their exact names: under another name they are never called.",
      "Correct the name: two underscores on either side of init, and forward as one word.", certain=True,
      explains=("missing-attribute", "missing-super", "crashes")),
    M("float-size", "wrong", "a size is a float",
      "`/` gives a float even if the result is whole, and a shape takes whole numbers only.",
      "Use // where the size is computed.", certain=True),
    M("root-of-number", "wrong", "a function of torch is given a plain number",
      "torch.sqrt and its relatives take tensors.", "Use math.sqrt, or ** 0.5.", certain=True),
    M("tensor-as-condition", "wrong", "a tensor is used as a condition",
      "A tensor of several numbers is neither true nor false.", "Ask whether it is there: if mask is not None.",
      explains=("form-mask",)),
    M("mask-of-numbers", "wrong", "a mask of numbers stands where one of booleans belongs",
      "torch.ones, tril and triu make floating point numbers, and a mask that is filled in must be True or False.",
      "Convert it with bool(), or compare it with 0."),
    M("unknown-name", "wrong", "a tensor or module has nothing of this name",
      "The name is misspelled, or it belongs to something else.",
      "Compare it with the documentation, capital letters included.", certain=True),
    M("product-axes", "wrong", "two tensors are multiplied whose axes do not fit",
      "A product sums over the last axis of the first tensor and the last but one of the second; what comes before "
      "must be equal in both.",
      "Scores sum over the head width, Q (B, H, T, D) with K turned to (B, H, D, S); weights (B, H, T, S) then meet V "
      "(B, H, S, D).", symptom=True),
    M("elementwise-product", "wrong", "tensors are multiplied number by number, where a matrix product belongs",
      "`*` pairs numbers of the same place. A matrix product pairs every row with every column, as every query meets "
      "every key.", "Write @ or torch.matmul; for the scores, with the last two axes of the keys transposed."),
    M("view-sizes", "wrong", "a view asks for more or fewer numbers than there are",
      "The sizes of a view must multiply to the number of values in the tensor.",
      "Compare the two shapes, and find the size that is missing or counted twice.", symptom=True),
    M("syntax", "wrong", "the file is not valid Python", "Nothing in it can run.", "Fix the line named here first."),
    M("backward-fails", "wrong", "the gradient cannot be computed",
      "A tensor that backward needs was changed in place.",
      "Replace the operation that ends in _ with the one that returns a new tensor."),
    M("no-gradient", "wrong", "no gradient flows through the result",
      "No parameter can learn.", "Look for detach(), .data, no_grad or a conversion to numpy."),
    M("gradient-cut", "wrong", "no gradient reaches weights that are used",
      "These weights change the result and can never learn.",
      "Look for detach(), .data, no_grad or .item() on the way from these weights to the result.",
      explains=("weights-detached",)),
    M("never-learns", "wrong", "weights start where their gradient is zero, and stay there",
      "Weights that are multiplied with each other and all start at zero never get a gradient.",
      "Start at most one of them at zero."),
    M("dead-parameter", "fragile", "a parameter never gets a gradient",
      "It is stored and counted but has no effect on the result.", "Use it or remove it.", symptom=True),
    # robustness
    M("cross-length", "wrong", "it fails when keys and queries have different lengths",
      "Cross-attention needs this: a decoder attends to an encoder output of another length.",
      "Read the number of keys from the key, and the number of queries from the query.", symptom=True),
    M("nan-empty-row", "fragile", "a query that may see no key gives NaN",
      "The softmax of a row of minus infinities is 0/0; one padded sample can then spoil the whole batch.",
      "Decide what such a row should give, and set it."),
    M("half-fill", "fragile", "the fill value does not fit into float16",
      "The largest float16 is 65504, so −1e9 overflows.", "Use minus infinity, or torch.finfo(scores.dtype).min."),
    M("half-fails", "fragile", "it does not run in half precision",
      "A tensor of a fixed type is mixed in somewhere.", "Create tensors with the dtype and device of the input."),
    M("not-a-buffer", "fragile", "a tensor is kept as a plain attribute",
      "`.to(device)`, `.half()` and state_dict do not include it.", "Register it with register_buffer."),
    M("layers-in-list", "wrong", "layers are kept in a plain list",
      "They are not registered: no optimizer, state_dict or `.to(device)` reaches their weights.",
      "Use nn.ModuleList.", explains=("half-fails",)),
    M("cuda-only", "fragile", "a GPU is hard-coded",
      "The code cannot run anywhere else.", "Take the device from the input."),
    M("weights-unregistered", "wrong", "weights are kept as a plain tensor",
      "They are random, and no optimizer, state_dict or `.to(device)` reaches them.", "Wrap them in nn.Parameter.",
      explains=("remembers-calls", "not-a-buffer", "half-fails", "slow")),
    M("not-finite", "wrong", "queries or keys hold infinite numbers or NaN",
      "Every weight that is computed from them is NaN.", "Print the first tensor that is not finite.",
      explains=("mask-nan", "nan-in-training")),
    M("device-fixed", "fragile", "a tensor is created on the CPU, regardless of the input's device",
      "On a GPU the call fails, because tensors are on two devices.", "Pass device=x.device where the tensor is made."),
    M("compile-fails", "fragile", "`torch.compile` cannot compile it as one graph",
      "The graph breaks, and most of the gain from compilation is lost.",
      "Look for numbers read out of tensors, prints, numpy and Python side effects in forward."),
    M("meta-fails", "fragile", "it cannot be built or called on the meta device",
      "Large models are planned there without memory; something reads values that do not exist yet.",
      "Create tensors on the device of the input, and read no values from them."),
    M("beyond-buffer", "fragile", "an input longer than the stored mask is not handled",
      "A table made in the constructor fixes the maximum length.",
      "Reject longer inputs with a clear error, or make the mask from the input's length."),
    M("grouped-crashes", "fragile", "fewer key/value heads than query heads raise an error",
      "The number of key/value heads can be chosen, but only one choice works.",
      "Repeat every key and value head for the queries of its group before the product.", symptom=True),
    M("grouped-order", "wrong", "key and value heads are shared in different orders",
      "A query head then looks at the keys of one group and reads the values of another.",
      "Repeat keys and values in the same way; neighboring heads form a group."),
    M("dropout-unused", "wrong", "dropout is configured but never applied",
      "Training with dropout is the same as without.", "Apply it to the weights after the softmax."),
    M("slow", "slow", "it takes longer than the fused layer",
      "It computes the whole matrix of weights, T×T for every head.",
      "torch.nn.functional.scaled_dot_product_attention or headwise.MultiHeadAttention computes the same in blocks."),
    # assignments
    M("form-constructor", "wrong", "the constructor is not the assignment's",
      "The line that builds the class in the assignment fails here, or builds something else.",
      "Take the same parameters in the same order, with the same defaults."),
    M("form-width", "wrong", "the output is not as wide as the assignment's",
      "What follows the class in the assignment takes an output of another width.",
      "Compare the width of each head, and what is done with the heads, with the assignment."),
    M("form-dropout", "wrong", "dropout is not where the assignment has it",
      "Numbers of the output are left out in place of weights, so that training differs.",
      "Apply it to the weights, between the softmax and the product with the values."),
    M("form-call", "wrong", "the call is not the assignment's",
      "The assignment's example call fails here, or its arguments are taken for something else.",
      "Take the same arguments in the same order; only what the assignment leaves out may need a default."),
    M("form-return", "wrong", "it returns something other than the assignment asks for",
      "Code that uses the result as the assignment does fails.",
      "Compare what the last line of forward returns with what the assignment unpacks."),
    M("form-mask", "wrong", "the mask does not work as the assignment asks",
      "The same mask, or the same call without one, hides other keys than it should.",
      "Check which value of the mask keeps a key, whether the future is hidden without being asked, and that masks of "
      "numbers and of booleans both work: mask == 0 takes either."),
    M("form-name", "fragile", "names differ from the assignment's",
      "Code and checkpoints that use the assignment's names do not fit.",
      "Rename them if a grader or a checkpoint will look for them."),
    M("form-parameters", "fragile", "the parameters differ from the reference's",
      "A checkpoint of one cannot be loaded into the other.", "Compare the names and shapes in both state_dicts."),
    M("differs-from-reference", "wrong", "the result differs from the reference that you named",
      "With the same parameters and the same input, both should compute the same.",
      "Print both results step by step until they part."),
)  # fmt: skip
MISTAKES = {row.name: row for row in _ROWS}


@dataclass
class Finding:
    """A mistake that was found: `detail` holds the measured values, the table of mistakes the general words."""

    name: str
    detail: str = ""
    line: int | None = None
    text: str = ""  # the learner's line
    severity: str = ""  # the table's unless given
    cell: int | None = None  # of a notebook, counted among its code cells; `line` is then a line of this cell
    execution_count: int | None = None  # n of the `In [n]` beside that cell

    def __post_init__(self) -> None:
        self.severity = self.severity or self.mistake.severity

    @property
    def mistake(self) -> Mistake:
        """The row of the table."""
        return MISTAKES[self.name]

    @property
    def place(self) -> str:
        """Where it is: "line 12", in a notebook "code cell 7, line 3"; empty where no line is known."""
        return "" if self.line is None else place(self.line, self.cell, self.execution_count)

    @property
    def title(self) -> str:
        """What is wrong."""
        return self.mistake.title

    @property
    def why(self) -> str:
        """What that does."""
        return self.mistake.why

    @property
    def hint(self) -> str:
        """One next step."""
        return self.mistake.hint

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name, "severity": self.severity, "title": self.title, "detail": self.detail, "line": self.line,
            "cell": self.cell, "execution_count": self.execution_count, "text": self.text, "why": self.why,
            "hint": self.hint,
        }  # fmt: skip


def error_words(error: BaseException, most: int = 160) -> str:
    r"""The kind of an error and the first line of what it says.

    >>> error_words(TypeError("no\nmore"))
    'TypeError: no'
    """
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:most] if said else ''}"


def place(line: int, cell: int | None = None, execution_count: int | None = None) -> str:
    """A line in words. Cells are counted among the code cells; the `In [n]` beside one is added where it differs.

    >>> place(3), place(3, cell=7), place(3, cell=7, execution_count=9), place(3, execution_count=9)
    ('line 3', 'code cell 7, line 3', 'code cell 7 (In [9]), line 3', 'In [9], line 3')
    """
    if cell is None:
        return f"line {line}" if execution_count is None else f"In [{execution_count}], line {line}"
    shown = "" if execution_count in (None, cell) else f" (In [{execution_count}])"
    return f"code cell {cell}{shown}, line {line}"


class Note(NamedTuple):
    """Something worth saying that is not a mistake.

    good: a step that is right; variant: a known difference from plain attention that is right; doubt: a step that was
    not understood, so that nothing can be said about the whole; untried: something that could not be tested, so that
    the whole is right only as far as tested; absent: an item of the certificate does not apply; mask: what a mask
    argument means.
    """

    kind: Literal["good", "variant", "doubt", "untried", "absent", "mask"]
    words: str


Found = Iterator[Finding | Note]  # what a fault function gives


def settled(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that no other one explains, the most serious first, each mistake once.

    A wrong scale is only a number, and leads to no symptom that its row does not name.
    """
    found = list(findings)
    explained = {name for finding in found for name in finding.mistake.explains}
    wrong = [f.mistake for f in found if f.severity == "wrong" and f.name not in explained]
    if any(not mistake.symptom and mistake.step != "scale" for mistake in wrong):
        explained |= {finding.name for finding in found if finding.mistake.symptom}
    kept: dict[str, Finding] = {}
    for finding in sorted(found, key=lambda f: ORDER.index(f.severity)):
        if finding.name not in explained:
            kept.setdefault(finding.name, finding)
    return list(kept.values())
