package gpu

import "context"

// Null is the source of a host without GPUs, with the reason why it has none.
func Null(reason string) Source { return null{reason: reason} }

type null struct{ reason string }

var _ Source = null{}

func (n null) Inventory(ctx context.Context) (Inventory, error) {
	return Inventory{Source: SourceNone, Problem: n.reason}, ctx.Err()
}

func (n null) Sample(ctx context.Context) ([]Sample, error) { return nil, ctx.Err() }

func (n null) Close() error { return nil }
