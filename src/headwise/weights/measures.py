"""What can be measured of weights: rows, keys and pictures, each alone or many in one panel."""

from collections.abc import Mapping

from torch import Tensor

from headwise.masks import Mask
from headwise.weights import streaming
from headwise.weights.panel import Distances, Panel, Peak, Received, TopKeys, octave_edges, take_panel
from headwise.weights.source import Source

Size = tuple[int, int] | int


class Measures:
    """A thing with weights that can be streamed: the statistics of an `AttentionMap`."""

    def _normalised(self) -> Source:
        """What the weights are made of, with the log-sum-exp of every row."""
        raise NotImplementedError

    def panel(
        self,
        *,
        entropy: bool = False,
        peak: bool = False,
        distance: bool = False,
        histogram: bool = False,
        received: bool = False,
        masses: Mapping[str, Mask] | None = None,
        pooled: Size | None = None,
        pooled_peak: Size | None = None,
        topk: int | None = None,
    ) -> Panel:
        """Many statistics at once, which share passes over the weights.

        `weights.panel(entropy=True, received=True, masses={"previous": previous_token()}, pooled=(256, 256))`

        Args:
            entropy: the entropy of every row.
            peak: the largest weight of every row, and its key.
            distance: the mean distance of every row.
            histogram: the share of attention in every octave of distance.
            received: what every key receives.
            masses: names to probes, for the share of every row that lies where a probe is True.
            pooled: rows and columns of a picture.
            pooled_peak: rows and columns of a picture of largest weights.
            topk: how many of the largest weights of every row.
        """
        plain = {"entropy": entropy, "peak": peak, "distance": distance, "histogram": histogram, "received": received}
        sized = {"pooled": pooled, "pooled_peak": pooled_peak, "topk": topk}
        return take_panel(self._normalised(), plain, sized, masses)

    def entropy(self) -> Tensor:
        """−Σ w log w of every row, (B, H, T), in nats: 0 looks at one key, log(S) at all alike."""
        return self.panel(entropy=True).entropy  # type: ignore[return-value]

    def peak(self) -> Peak:
        """The largest weight of every row (B, H, T), and the key it lies on."""
        return self.panel(peak=True).peak  # type: ignore[return-value]

    def distance(self) -> Distances:
        """How far queries look: the mean of every row (B, H, T), and the histogram of every head over octaves."""
        panel = self.panel(distance=True, histogram=True)
        assert panel.distance is not None and panel.histogram is not None  # noqa: S101, PT018 - both were asked for
        return Distances(panel.distance, panel.histogram, octave_edges(panel.histogram.shape[-1]))

    def received(self) -> Received:
        """What every key receives (B, H, S): the sum, and the mean over the queries that could see it."""
        return self.panel(received=True).received  # type: ignore[return-value]

    def topk(self, k: int) -> TopKeys:
        """The k largest weights of every row (B, H, T, k), largest first, and their keys."""
        return self.panel(topk=k).topk  # type: ignore[return-value]

    def mass(self, probe: Mask) -> Tensor:
        """The share of every row's attention that lies where the probe is True, (B, H, T)."""
        return self.panel(masses={"probe": probe}).masses["probe"]

    def pooled(self, rows: int, cols: int | None = None, *, peak: bool = False) -> Tensor:
        """A picture (B, H, rows, cols): weights summed over the keys of a cell and averaged over its queries.

        Picture rows sum to 1 at every size, so that a narrow stripe never fades.

        Args:
            rows: how many rows; at most T are given.
            cols: how many columns, as many as rows unless given; at most S are given.
            peak: the largest weight of each cell instead.
        """
        size = (rows, rows if cols is None else cols)
        if peak:
            return self.panel(pooled_peak=size).pooled_peak  # type: ignore[return-value]
        return self.panel(pooled=size).pooled  # type: ignore[return-value]

    def log_sum_exp(self) -> Tensor:
        """The log of every row's sum of exp(score), (B, H, T), sinks counted; minus infinity where nothing is seen."""
        return streaming.log_sum_exp(self._normalised()).clone()
