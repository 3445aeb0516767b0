package lifecycle

import (
	"sync"
	"time"
)

// Clock is the gateway's time line (DESIGN D2): it starts at the later of the wall clock and the last commit and goes on by a clock that
// nobody can set, so that it never goes back, whatever is done to the wall clock and however often the gateway restarts.
type Clock struct {
	boot  func() time.Duration
	start time.Time
	from  time.Duration

	mu   sync.Mutex
	last time.Time
}

// NewClock starts a time line. boot reads a clock that only goes forward, also while the machine sleeps (BootTime).
func NewClock(wall time.Time, boot func() time.Duration, lastCommit time.Time) *Clock {
	start := wall
	if lastCommit.After(start) {
		start = lastCommit
	}
	return &Clock{boot: boot, start: start.UTC().Round(0), from: boot()}
}

// Now returns gateway time, in UTC, with the store's precision of a millisecond. It never goes back.
func (c *Clock) Now() time.Time {
	now := c.start.Add(c.boot() - c.from).Truncate(time.Millisecond)
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Before(c.last) {
		return c.last
	}
	c.last = now
	return now
}
