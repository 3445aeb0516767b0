package rpc

import (
	"context"

	"github.com/carrel-dev/carrel/services/event"
)

// Watcher wakes Watch streams.
type Watcher interface {
	// Each calls send at once, then after every change that the filter lets through (several changes may be one call) and at least
	// every keep-alive interval, until ctx ends or send fails.
	Each(ctx context.Context, filter event.Filter, send func() error) error
}
