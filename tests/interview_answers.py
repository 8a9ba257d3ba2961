"""Sentences of candidates, by question and point: those that make the point, and those that do not, though they use
its words. The patterns were written to tell the first set apart; the second was written afterwards.
"""

Answers = dict[str, list[tuple[list[str], list[str]]]]

SAID: Answers = {
    "several-heads": [
        (
            [
                "Each head has its own projection matrices, so the model attends to different things at the same time.",
                "One softmax gives one distribution per token; with eight heads a token gets eight of them.",
                "Different heads can specialise, one on syntax, another on coreference.",
                "several heads can look at different places at once",
                "Each head learns its own pattern, for example one for syntax and one for the previous word.",
                "With multiple heads a token can focus on different positions simultaneously.",
            ],
            [
                "Several heads make training faster because they run in parallel on the GPU.",
                "All heads share one set of weights and look at the same pattern.",
                "Multiple heads reduce overfitting.",
                "one head averages everything together",
                "All heads use the same attention weights.",
                "It is easier to train.",
            ],
        ),
        (
            [
                "Because every head is d_model / h wide, the total compute and parameter count stay the same.",
                "It costs nothing extra: eight heads of 64 need as many FLOPs as one of 512.",
                "Parameter count doesn't change, you only split d_model.",
                "Total FLOPs are identical because d_k shrinks as h grows.",
                "You pay nothing extra, the parameter count stays identical.",
                "The total compute is unchanged because d_k = d_model / h.",
            ],
            [
                "Eight heads need eight times the parameters.",
                "The cost grows with the number of heads, so you pay for every head.",
                "You need h times more compute.",
                "8 times more parameters",
                "It costs h times more compute.",
                "More heads are slower.",
            ],
        ),
        (
            [
                "The downside: each head only works in a 64-dimensional subspace, so its score matrix has low rank.",
                "You trade width per head for more heads: with too many, every head is too narrow to be useful.",
                "Each head sees just d_model/h features, so it is less expressive on its own.",
                "Each head only sees a 64-dimensional subspace.",
                "The downside is that the dimension per head gets smaller.",
            ],
            [
                "There is no downside, more heads are always better.",
                "Each head gets the full 512 dimensions.",
                "Heads become more expressive the more of them there are.",
                "one head averages everything together",
                "Each head works in the full dimension.",
                "Every head gets a larger width.",
            ],
        ),
    ],
    "complexity": [
        (
            [
                "Computing the scores takes O(n^2 d), it grows with the square of the sequence length.",
                "Every token is compared with every other token, so doubling the context quadruples that work.",
                "n squared in tokens.",
                "Attention is O(T^2 * d).",
                "O(n^2 d) for the attention matrix",
                "Doubling the sequence makes the scores four times as expensive.",
                "n squared",
            ],
            [
                "It is linear in the sequence length.",
                "It is n log n, like sorting.",
                "Attention is O(T * d).",
                "linear in the sequence length",
                "O(n^3)",
                "O(n log n)",
            ],
        ),
        (
            [
                "The linear layers are O(n d^2).",
                "The four projections cost n times d_model squared each.",
                "Q, K, V and output projections are 4 n d^2.",
                "Projecting costs O(T E²).",
                "Projections cost T times d_model squared.",
            ],
            [
                "The projections are free, only the softmax costs anything.",
                "The projections are linear in d_model.",
                "Projecting costs O(T E).",
                "The projections are linear in the width.",
                "The projections are O(n^2).",
            ],
        ),
        (
            [
                "For short texts the linear layers dominate; beyond about 2·d_model tokens the attention matrix does.",
                "Which term wins depends on whether n is larger than d.",
                "When n < d the projections are the bigger part.",
                "It only becomes attention-dominated at long context.",
                "For short sequences the linear layers dominate, for long ones the scores.",
                "Once n > 2d the attention part is bigger.",
            ],
            [
                "The attention matrix always dominates.",
                "It always takes the same time, however long the text is.",
                "Both parts are equally expensive regardless of n.",
                "The projections always dominate.",
                "Both parts are always equal.",
            ],
        ),
    ],
    "grouped": [
        (
            [
                "In GQA, groups of query heads share the same keys and values.",
                "You keep 32 query heads but use only 8 KV heads, each serving four queries.",
                "GQA lets multiple Q heads use one K/V head.",
                "Fewer kv heads than q heads.",
                "Multiple query heads use the same K and V head.",
                "In GQA, K and V heads are shared across a group of queries.",
            ],
            [
                "In GQA, queries are shared and every head has its own keys and values.",
                "GQA groups tokens together so that fewer tokens are compared.",
                "GQA uses one query for all keys.",
                "GQA uses fewer query heads",
                "Each query head has its own key and value head.",
                "The keys share a query head.",
            ],
        ),
        (
            [
                "The KV cache gets smaller by the group size, which is why servers like it.",
                "You store four times fewer keys and values per token.",
                "That cuts KV-cache memory by 4x for 32/8.",
                "Main benefit: smaller cache at inference.",
                "It cuts KV cache memory by the group size.",
                "You store less K/V during decoding.",
            ],
            [
                "The cache gets larger, because groups have to be stored too.",
                "It does not change the cache at all.",
                "The cache is twice as big.",
                "The cache gets bigger.",
                "The cache stays the same.",
            ],
        ),
        (
            [
                "The score computation is unchanged: every query head still compares with every key.",
                "The FLOPs for QK^T stay the same, only the memory traffic goes down.",
                "Attention FLOPs are identical.",
                "It does not save compute in the scores.",
                "The QK^T flops do not change.",
                "Compute for attention scores is unaffected, since there are as many query heads.",
            ],
            [
                "It makes the score computation four times cheaper.",
                "It reduces the complexity from quadratic to linear.",
                "You save a factor of four in attention FLOPs.",
                "The scores get cheaper by the group size.",
                "GQA reduces the score computation.",
            ],
        ),
        (
            [
                "The extreme case with a single KV head is multi-query attention.",
                "MQA is GQA with one group.",
                "Going down to one kv head gives you MQA.",
                "MQA is the extreme case with a single KV head.",
                "One K/V head for all queries gives MQA.",
            ],
            [
                "With one key/value head it is the same as ordinary multi-head attention.",
                "MQA means that there are many more queries than in GQA.",
                "MQA and MHA are the same thing.",
                "Multi-query attention has many key heads.",
                "With one key/value head it is ordinary attention.",
            ],
        ),
    ],
    "parameters": [
        (
            [
                "Four weight matrices, 512 by 512 each: Q, K, V and O.",
                "W_q, W_k, W_v and W_o all have 512² entries.",
                "4 × d², for q, k, v and output.",
                "4*(512*512+512) = 1050624",
                "Wq, Wk, Wv and Wo, each 512x512",
                "4 d^2 weights",
            ],
            [
                "Three matrices of 512 × 512.",
                "One matrix per head, that is eight.",
                "2 × 512 × 512 for keys and values.",
                "Three matrices of 512 by 512",
                "3*512*512",
                "8 * 512 * 64",
            ],
        ),
        (
            [
                "Plus four bias vectors of 512.",
                "And each of the linear layers adds 512 biases, 2048 in total.",
                "Then add 4·512 for the biases.",
                "Bias terms: 512 each.",
                "4*(512*512+512) = 1050624",
                "4 * 512 * 513",
                "plus 4 times 512 for the bias terms",
            ],
            [
                "There are no biases in a linear layer.",
                "Biases are not parameters.",
                "I leave out the bias because it is never used.",
                "There are no biases.",
                "4 * 512^2",
                "one bias of 512",
            ],
        ),
        (
            [
                "1,050,624 in total.",
                "So 4 * 512 * 512 + 4 * 512 = 1050624.",
                "1050624",
                "It's 1 050 624.",
                "4 * 512 * 513",
                "4*(512*512+512)",
                "1.050624M",
                "1050624 parameters",
            ],
            [
                "1,048,576 in total.",
                "That makes 262,656 parameters, about 0.26 million.",
                "It's 1,050,623.",
                "Roughly two million.",
                "4*512*512 = 1048576",
                "786432",
                "about 2 million",
            ],
        ),
        (
            [
                "It doesn't depend on the number of heads.",
                "With 16 heads it would be the same number, the heads are only a reshape.",
                "h doesn't matter here, only d_model does.",
                "The head count has no influence.",
                "It does not depend on h.",
                "The same for 1 head or 16 heads.",
            ],
            [
                "Multiply by 8, because every head has that many.",
                "More heads would mean more parameters.",
                "The head count scales it linearly.",
                "Multiply by 8 heads.",
                "More heads mean more parameters.",
            ],
        ),
    ],
    "flops": [
        (
            [
                "The four linear layers need 4 · 2 · T · E² = 8TE² operations.",
                "Each projection is 2·T·E², and there are four of them.",
                "Projections: 8 T E^2.",
                "4 matmuls of 2*T*E*E.",
                "8*n*d^2 + 4*n^2*d = 8*1024*512^2 + 4*1024^2*512 = 4,294,967,296",
                "8 T d^2 + 4 T^2 d",
                "4 * 2 * T * E * E for the linear layers",
                "8TE²",
            ],
            [
                "The projections need T² · E operations.",
                "There is only one projection to count, 2·T·E.",
                "Projections: 8 T E.",
                "4*n*d^2",
                "8*n^2*d",
                "6 T d^2",
            ],
        ),
        (
            [
                "QK^T and the weighted sum are 2T²E each, so 4T²E together.",
                "Scores: 2·T·T·D for each head, times H heads, and the same again for weights times values.",
                "plus 4 T^2 E for QK^T and AV.",
                "Attention itself is quadratic: two T×T×D matmuls per head.",
                "8*n*d^2 + 4*n^2*d = 8*1024*512^2 + 4*1024^2*512 = 4,294,967,296",
                "8 T d^2 + 4 T^2 d",
                "2·T²·E for QK^T and 2·T²·E for the values",
                "4*L**2*d_model",
            ],
            [
                "The scores cost 4·T·E.",
                "The attention matrix costs nothing compared with the rest.",
                "plus 4 T E for the attention.",
                "2*n^2*d",
                "4*n*d",
                "4 n d^2",
            ],
        ),
        (
            [
                "8·1024·512² + 4·1024²·512 = 4,294,967,296.",
                "About 4.29 GFLOPs in total.",
                "2^31 for the projections and as much for the attention: 2^32.",
                "8*n*d^2 + 4*n^2*d = 8*1024*512^2 + 4*1024^2*512 = 4,294,967,296",
                "4.29 G",
                "8*1024*512**2 + 4*1024**2*512",
                "about 4.29 GFLOPs",
            ],
            [
                "In total 4,294,967,295.",
                "8*1024*512^2 + 2*1024^2*512 = 3,221,225,472.",
                "about 5 billion operations.",
                "4,294,967,295",
                "8*n*d^2 = 2,147,483,648",
                "4.92 G",
                "3.2 billion",
            ],
        ),
        (
            [
                "I count a multiply-add as two FLOPs.",
                "One multiplication and one addition for each term, hence the factor 2.",
                "mul + add = 2 flops.",
                "with 2 FLOPs per MAC.",
                "2 flops per MAC",
                "Each multiply-accumulate is two operations.",
                "I count a multiply and an add separately.",
            ],
            [
                "A multiply-add is one operation, as everybody counts it.",
                "I ignore additions.",
                "with 1 FLOP per MAC.",
                "I count MACs.",
                "A multiply-add counts as one.",
            ],
        ),
    ],
    "memory": [
        (
            [
                "Every head holds a T × T matrix, so H·T² floats.",
                "It is quadratic in the sequence length: 8 × 1024 × 1024 numbers.",
                "seq² per head per sample.",
                "B*H*T*T floats.",
                "B*H*T*T floats",
                "h n^2 entries",
                "A T by T matrix per head",
            ],
            [
                "They take T numbers for each head.",
                "They take as much as the weights of the linear layers, d_model squared.",
                "B*H*T*D floats.",
                "T numbers per head",
                "H*T*D numbers",
                "d_model squared",
            ],
        ),
        (
            [
                "8*1024*1024*2 bytes = 16 MiB",
                "16 MB in bf16, or 32 MB in float32",
                "33,554,432 bytes in fp32",
                "32 MiB",
            ],
            [
                "8*1024*1024*2 bytes = 64 MiB",
                "It takes 2 GB.",
                "1024*512 numbers",
                "32 MiB in bfloat16",
            ],
        ),
        (
            [
                "During training they are saved for the backward pass.",
                "Autograd keeps the probabilities because their gradient needs them.",
                "You need them again for backprop, so they stay in memory.",
                "They have to be saved for backprop.",
                "Autograd stores them for the gradient.",
            ],
            [
                "They can be thrown away at once, also in training.",
                "They are needed in inference only.",
                "Backprop recomputes nothing and needs nothing.",
                "They are freed right away.",
                "Training needs no memory for them.",
            ],
        ),
        (
            [
                "FlashAttention goes over blocks of keys and never materializes the matrix.",
                "It uses an online softmax over tiles in SRAM, so only O(T) is stored.",
                "Flash attention streams K/V in chunks and rescales, so the T×T matrix never hits HBM.",
                "FlashAttention computes them block by block in SRAM and never writes them out.",
                "The full matrix is never materialized.",
            ],
            [
                "A fused kernel stores the matrix in float16 to save half of it.",
                "A fused kernel compresses the matrix and writes it to disk.",
                "Flash attention skips small weights.",
                "Flash attention stores the whole matrix.",
                "A fused kernel approximates the weights.",
            ],
        ),
    ],
    "root": [
        (
            [
                "If q and k have unit variance, their dot product has variance d.",
                "The magnitude of the scores increases with the dimension, like its square root.",
                "Var(q·k) = d_k, so std is sqrt(d_k).",
                "Summing d products makes logits bigger as d grows.",
                "The variance of q·k is d, so the standard deviation is sqrt(d).",
                "Dot products grow with the dimension: Var = d_k.",
            ],
            [
                "Dot products get smaller with more dimensions, so we make them larger.",
                "It makes the rows sum to one.",
                "It makes q and k orthogonal.",
                "The dot product has variance 1.",
                "The variance is d squared.",
            ],
        ),
        (
            [
                "Large logits push the softmax into saturation, it becomes nearly one-hot.",
                "Otherwise one weight would be almost 1 and all others almost 0.",
                "Softmax collapses onto the max otherwise.",
                "You'd get a near-argmax.",
                "Otherwise softmax becomes almost one-hot.",
                "Big logits push softmax into saturation.",
            ],
            [
                "Without it the softmax would be uniform.",
                "It keeps the softmax from being negative.",
                "You would get a flat distribution.",
                "Otherwise the softmax is uniform.",
                "Softmax becomes linear.",
            ],
        ),
        (
            [
                "There the softmax has tiny gradients and learning stalls.",
                "In that regime the derivative is close to zero.",
                "and backprop through a saturated softmax gives almost nothing.",
                "and then almost no gradient flows",
                "The gradient goes to zero.",
            ],
            [
                "It prevents exploding gradients in the embedding layer.",
                "Gradients are not affected by it.",
                "and gradients would explode.",
                "The gradients explode.",
                "The gradients get larger.",
            ],
        ),
        (
            [
                "d is the dimension of one head, d_k, so 64 and not 512.",
                "You take the head size, d_model divided by the number of heads.",
                "It's d_head = d_model / h.",
                "Use the per-head dimension.",
                "d is d_k, the per-head dimension.",
                "d_model / num_heads",
                "the head size, 64",
            ],
            [
                "d is d_model, so √512.",
                "d is the number of tokens.",
                "Use the embedding dimension.",
                "d is d_model",
                "d is the embedding dimension, 512",
                "the sequence length",
            ],
        ),
    ],
    "cache": [
        (
            [
                "In decoding we store the keys and values of all previous tokens, since they do not change.",
                "Past K and V stay the same under a causal mask, so we reuse them instead of computing them again.",
                "K and V for earlier positions are saved so you don't compute them twice.",
                "We store K and V of earlier tokens so we need not recompute them.",
                "It keeps past keys and values.",
            ],
            [
                "It stores the queries of past tokens.",
                "It stores the generated text, so that the same prompt is answered at once.",
                "The attention weights of earlier positions are saved.",
                "It caches the queries",
                "It stores the attention weights.",
                "It keeps the outputs of the layer.",
            ],
        ),
        (
            [
                "Each new token then needs only one row of scores, linear work instead of quadratic.",
                "Without it every step would reprocess the whole prefix.",
                "Per step you go from quadratic to linear.",
                "Each decoding step is linear in the context instead of quadratic.",
                "A step costs O(n), not O(n^2).",
            ],
            [
                "A new token costs O(T²) with the cache.",
                "Each step takes constant time, however long the text is.",
                "Per step you go from linear to quadratic.",
                "Each step costs O(1).",
                "A step is still quadratic.",
            ],
        ),
        (
            [
                "Its size is 2 × layers × KV heads × head_dim × tokens × bytes.",
                "Two tensors per layer, each with n_kv_heads times head_dim numbers for every token.",
                "2 * n_layers * n_kv_heads * d_head * seq_len * 2 bytes.",
                "2 * n_layers * n_kv_heads * d_head per token",
                "two tensors per layer, each kv heads times head dim",
            ],
            [
                "Its size does not depend on the length.",
                "It is T² numbers for each head.",
                "n_layers * vocab_size bytes.",
                "d_model per token",
                "T^2 per layer",
            ],
        ),
        (
            [
                "Decoding becomes memory-bandwidth bound: the whole cache is read for every token.",
                "The bottleneck is then reading it from HBM, not arithmetic.",
                "Generation is bandwidth-limited because you stream the cache each step.",
                "Decoding becomes memory bandwidth bound.",
                "Loading the cache from HBM is the bottleneck.",
            ],
            [
                "Decoding is then limited by the matrix multiplications.",
                "Reading it takes no time.",
                "Generation is compute-limited because of the cache.",
                "Decoding becomes compute bound.",
                "The cache costs no bandwidth.",
            ],
        ),
    ],
    "mask": [
        (
            [
                "If you zero weights after the softmax, the rest no longer add up to one.",
                "Masking afterwards breaks the normalization, the hidden keys have already taken part of the mass.",
                "Post-softmax zeroing leaves rows that sum to less than 1.",
                "If you zero after softmax the probabilities do not add up to one.",
                "The row would not be normalized any more.",
            ],
            [
                "After the softmax the rows still sum to one.",
                "Zero after the softmax is the same thing, only slower.",
                "Post-softmax zeroing leaves rows that sum to 1.",
                "After the softmax it still sums to 1.",
                "-inf is faster",
            ],
        ),
        (
            [
                "e to the minus infinity is exactly zero.",
                "exp(-inf) = 0, so hidden positions get no weight at all.",
                "Softmax of -inf is 0.",
                "exp(-inf) = 0",
                "-inf gives a weight of exactly zero",
            ],
            [
                "exp(-inf) is minus infinity.",
                "A score of 0 gives a weight of exactly zero.",
                "Softmax of -inf is NaN for every key.",
                "exp(-inf) is 1",
                "-inf is faster",
                "-inf becomes a small number",
            ],
        ),
        (
            [
                "-1e9 overflows in half precision.",
                "fp16 can't represent -1e9, its limit is about 65k.",
                "In fp16 the largest magnitude is 65504, so -1e9 turns into -inf anyway.",
                "fp16 cannot represent -1e9, its maximum is 65504.",
            ],
            [
                "-1e9 is more precise than -inf in float16.",
                "-1e9 is fine in fp16.",
                "In fp16, -1e9 is exact.",
                "-1e9 works in float16.",
                "-1e9 is slower",
            ],
        ),
        (
            [
                "A row where everything is masked gives NaN, 0/0.",
                "The catch: a fully padded query becomes nan and has to be handled.",
                "If all keys of a query are hidden you divide zero by zero and get NaN.",
                "A fully masked row gives NaN.",
                "If everything is -inf, softmax returns nan.",
            ],
            [
                "A row where everything is masked gives a uniform average with −∞.",
                "NaN cannot happen.",
                "If all keys of a query are hidden you get zeros automatically.",
                "A fully masked row gives zeros.",
                "NaN never happens.",
            ],
        ),
    ],
    "contiguous": [
        (
            [
                "transpose only swaps the strides, the data stays where it is.",
                "After transpose the tensor is a view with a different memory layout.",
                "Transposing is just metadata, strides are permuted.",
                "transpose only changes the strides",
                "The data does not move in memory on a transpose.",
            ],
            [
                "transpose moves the data in memory.",
                "transpose sorts the tensor.",
                "Transposing reorders the storage.",
                "transpose copies the data",
                "contiguous makes it faster on GPU",
            ],
        ),
        (
            [
                "view needs compatible strides and throws an error otherwise.",
                "You can't merge two dimensions with view if they are not next to each other in memory.",
                "view() refuses non-contiguous memory here: RuntimeError.",
                "view needs the dimensions to be adjacent in memory",
                "view fails on a non-contiguous tensor.",
            ],
            [
                "view would silently give the wrong numbers.",
                "view works on every tensor, contiguous() is for speed.",
                "view() is fine with non-contiguous memory.",
                "view copies if it must",
                "contiguous makes it faster on GPU",
            ],
        ),
        (
            [
                "contiguous() makes a copy in the right order; reshape would do that too.",
                "It rewrites the tensor into row-major order, which costs a copy.",
                ".contiguous() materialises a new tensor in row-major order.",
                "contiguous() makes a copy in the right order",
                "reshape copies when needed",
            ],
            [
                "contiguous() only sets a flag and copies nothing.",
                "contiguous() moves the tensor to the GPU.",
                ".contiguous() is a no-op.",
                "contiguous does not copy",
                "contiguous changes only the strides",
            ],
        ),
    ],
    "output-projection": [
        (
            [
                "It lets information from different heads interact.",
                "W_o blends the outputs of all heads into one vector.",
                "It combines what the heads found.",
                "Heads can't communicate otherwise.",
                "It lets information flow between heads.",
                "W_o combines the outputs of all heads.",
            ],
            [
                "It normalizes the output.",
                "It turns the output into probabilities over the vocabulary.",
                "It scales the result.",
                "It adds a nonlinearity.",
                "It splits the heads.",
            ],
        ),
        (
            [
                "Without it, each slice of the output would come from one head only.",
                "The heads would just be concatenated, every feature depending on a single head.",
                "You'd have h independent chunks glued together, each from its own head.",
                "Without it the heads are only concatenated, each in its own slice.",
                "Every output dimension would come from a single head.",
            ],
            [
                "Without it the output would have the wrong shape.",
                "Nothing would be lost, it is only there for speed.",
                "You would have the mean of the heads.",
                "Nothing is lost.",
                "The output would have the wrong shape.",
            ],
        ),
    ],
}

HELD_OUT: Answers = {
    "several-heads": [
        (
            [
                "Each head can attend to another part of the sentence in parallel.",
                "One head may follow the syntax while another tracks pronouns.",
                "A single head has to average all relations into one attention pattern; many heads don't.",
            ],
            [
                "Heads make the model deeper.",
                "More heads use more parallel hardware.",
            ],
        ),
        (
            [
                "FLOPs stay the same since the head dimension shrinks accordingly.",
            ],
            [
                "It takes eight times the FLOPs.",
            ],
        ),
        (
            [
                "But a head with 64 dimensions has less capacity.",
            ],
            [
                "Heads get more dimensions each.",
            ],
        ),
    ],
    "complexity": [
        (
            [
                "Attention is O(T^2 * E).",
                "It grows quadratically with the context length.",
            ],
            [
                "It grows linearly with the context length.",
                "O(1) per token",
            ],
        ),
        (
            [
                "The Q, K, V and output projections are O(T * E^2).",
            ],
            [
                "The projections cost nothing.",
            ],
        ),
        (
            [
                "At long context the quadratic term takes over.",
            ],
            [
                "The length never matters for which part is larger.",
            ],
        ),
    ],
    "grouped": [
        (
            [
                "A group of query heads attends to one shared key/value head.",
            ],
            [
                "Each token shares its query.",
                "Every query head keeps a key head of its own.",
            ],
        ),
        (
            [
                "The KV cache is four times smaller.",
            ],
            [
                "The KV cache is four times larger.",
            ],
        ),
        (
            [
                "You still compute the same number of scores.",
            ],
            [
                "There are fewer scores to compute.",
            ],
        ),
        (
            [
                "With only one KV head you get multi-query attention.",
            ],
            [
                "MQA means one query head.",
            ],
        ),
    ],
    "parameters": [
        (
            [
                "There are four 512x512 weight matrices.",
                "4·d²",
            ],
            [
                "6 matrices of 512 x 512",
                "512 * 512",
            ],
        ),
        (
            [
                "each with a bias of 512",
            ],
            [
                "no bias terms",
                "512 in total for the bias",
            ],
        ),
        (
            [
                "4*512**2 + 4*512",
                "in total 1,050,624",
                "4 (512² + 512)",
            ],
            [
                "4*512**2 + 512",
                "1,050,642",
                "4 * 512 * 512",
            ],
        ),
        (
            [
                "The head count makes no difference.",
            ],
            [
                "Each of the 8 heads adds parameters.",
            ],
        ),
    ],
    "flops": [
        (
            [
                "8 L d_model²",
                "8*1024*512*512 = 2147483648 for the projections",
            ],
            [
                "4 L d_model²",
                "8 L d_model",
            ],
        ),
        (
            [
                "4 N^2 d",
                "2 n^2 d for the scores plus 2 n^2 d for the weighted sum",
            ],
            [
                "8 N^2 d",
                "N^2",
            ],
        ),
        (
            [
                "4294967296",
                "roughly 4.29 billion",
                "2147483648 + 2147483648",
            ],
            [
                "8589934592",
                "roughly 4.1 billion",
            ],
        ),
        (
            [
                "One MAC is 2 flops.",
            ],
            [
                "I only count multiplications.",
            ],
        ),
    ],
    "memory": [
        (
            [
                "n × n per head",
                "8 * 1024 * 1024 floats = 32 MiB",
            ],
            [
                "n × d per head",
            ],
        ),
        ([], []),
        (
            [
                "Backprop needs the probabilities, so they are kept.",
            ],
            [
                "They are only used in the forward pass.",
            ],
        ),
        (
            [
                "FlashAttention tiles the computation so the matrix is never stored.",
            ],
            [
                "Flash attention is an approximation.",
            ],
        ),
    ],
    "root": [
        (
            [
                "The variance of a dot product grows with the dimension.",
            ],
            [
                "The mean of a dot product grows.",
            ],
        ),
        (
            [
                "softmax gets too peaky and saturates",
            ],
            [
                "softmax gets too smooth",
            ],
        ),
        (
            [
                "so gradients become tiny",
            ],
            [
                "so gradients become huge",
            ],
        ),
        (
            [
                "It's the dimension of each head.",
            ],
            [
                "It's the model dimension.",
            ],
        ),
    ],
    "cache": [
        (
            [
                "You save the K and V tensors from earlier steps.",
            ],
            [
                "You save the Q tensors.",
                "You cache the softmax.",
            ],
        ),
        (
            [
                "Without it every step would recompute the whole prefix; with it a step is O(n).",
            ],
            [
                "With it a step is O(n^2).",
            ],
        ),
        (
            [
                "2 x layers x kv heads x head dim x bytes",
            ],
            [
                "It depends on the number of queries.",
            ],
        ),
        (
            [
                "At decode time you are limited by memory bandwidth.",
            ],
            [
                "At decode time the GPU's arithmetic is the limit.",
            ],
        ),
    ],
    "mask": [
        (
            [
                "Zeroing afterwards leaves rows that don't sum to one.",
            ],
            [
                "Zeroing afterwards is equivalent.",
            ],
        ),
        (
            [
                "e^-inf is 0, so those weights are exactly zero.",
            ],
            [
                "-inf means the score is ignored by the optimizer.",
            ],
        ),
        (
            [
                "In fp16, -1e9 is out of range.",
            ],
            [
                "In fp16, -1e9 is more accurate.",
            ],
        ),
        (
            [
                "If all keys of a row are masked you get NaN.",
            ],
            [
                "If all keys are masked you get 0.",
            ],
        ),
    ],
    "contiguous": [
        (
            [
                "Transposing returns a view with other strides.",
            ],
            [
                "Transposing allocates new memory.",
            ],
        ),
        (
            [
                "view throws an error on a transposed tensor.",
            ],
            [
                "view is always fine.",
            ],
        ),
        (
            [
                "contiguous copies the tensor to a fresh block of memory",
            ],
            [
                "contiguous is free",
            ],
        ),
    ],
    "output-projection": [
        (
            [
                "It is the only place where heads exchange information.",
            ],
            [
                "It normalizes the output.",
            ],
        ),
        (
            [
                "Each chunk of the output would depend on one head only.",
            ],
            [
                "The model could not be trained.",
            ],
        ),
    ],
}
