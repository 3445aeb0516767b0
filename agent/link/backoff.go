package link

import (
	"context"
	"math/rand/v2"
	"time"
)

// backoff gives waits with full jitter: anything between nothing and a bound
// that doubles, so that the hosts of a restarted gateway do not come together.
type backoff struct{ tries int }

func (b *backoff) next(least, most time.Duration) time.Duration {
	bound := most
	if b.tries < 30 { // beyond, the shift could overflow
		bound = min(most, least<<b.tries)
	}
	b.tries++
	return rand.N(bound) + time.Millisecond
}

func (b *backoff) reset() { b.tries = 0 }

// sleep waits for d, and is false where ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
