"""The same as `gradient_aggregation`, where operations are executed at once."""

from .gradient_aggregation import LocalGradientAggregationHelper as LocalGradientAggregationHelperEager

__all__ = ["LocalGradientAggregationHelperEager"]
