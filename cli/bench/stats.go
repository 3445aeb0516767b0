//go:build linux

package main

import (
	"math"
	"slices"
	"time"
)

// quantile returns the value below which the share q of the values lies (nearest rank); NaN without values.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(q*float64(len(sorted)))) - 1
	return sorted[min(max(rank, 0), len(sorted)-1)]
}

// median returns the middle value, or the mean of the two in the middle; NaN without values.
func median(values []float64) float64 {
	n := len(values)
	if n == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	if n%2 == 1 {
		return sorted[n/2]
	}
	return (sorted[n/2-1] + sorted[n/2]) / 2
}

// ratios divides the values of the same round.
func ratios(subject, peer []float64) []float64 {
	n := min(len(subject), len(peer))
	out := make([]float64, n)
	for i := range n {
		out[i] = subject[i] / peer[i]
	}
	return out
}

// spread is the lowest and the highest of a set of ratios.
type spread struct{ Low, High float64 }

func spreadOf(values []float64) spread {
	if len(values) == 0 {
		return spread{math.NaN(), math.NaN()}
	}
	return spread{slices.Min(values), slices.Max(values)}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// rotated returns items beginning with another one each round, so that none always follows the same.
func rotated[T any](items []T, round int) []T {
	if len(items) == 0 {
		return nil
	}
	n := round % len(items)
	return append(slices.Clone(items[n:]), items[:n]...)
}
