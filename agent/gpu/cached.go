package gpu

import (
	"context"
	"sync"
	"time"
)

// Cached keeps an inventory for ttl, so that all who ask within it share one look at the driver. Samples pass through.
func Cached(src Source, ttl time.Duration, now func() time.Time) Source {
	return &cached{Source: src, ttl: ttl, now: now, turn: make(chan struct{}, 1)}
}

type cached struct {
	Source
	ttl  time.Duration
	now  func() time.Time
	turn chan struct{} // holds one token while somebody asks the source

	mu   sync.Mutex
	have bool
	at   time.Time
	inv  Inventory
}

func (c *cached) Inventory(ctx context.Context) (Inventory, error) {
	if inv, ok := c.fresh(); ok {
		return inv, nil
	}
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return Inventory{}, ctx.Err()
	}
	if inv, ok := c.fresh(); ok { // another asked while this one waited
		return inv, nil
	}
	inv, err := c.Source.Inventory(ctx)
	if err != nil {
		return Inventory{}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.have, c.at, c.inv = true, c.now(), inv
	return inv.clone(), nil
}

func (c *cached) fresh() (Inventory, bool) {
	now := c.now()
	c.mu.Lock()
	defer c.mu.Unlock()
	age := now.Sub(c.at)
	// A clock that went back makes the age negative: then ask again.
	if !c.have || age < 0 || age >= c.ttl {
		return Inventory{}, false
	}
	return c.inv.clone(), true
}
