package lifecycle

import (
	"testing"
	"time"
)

// whatever is done to the wall clock, gateway time goes on from the last commit and never goes back.
func TestClock(t *testing.T) {
	boot := 5 * time.Hour
	read := func() time.Duration { return boot }
	c := NewClock(noon, read, noon.Add(-time.Hour))
	if got := c.Now(); !got.Equal(noon) {
		t.Errorf("starts at %v", got)
	}
	boot += 90*time.Minute + 1500*time.Microsecond
	if got := c.Now(); !got.Equal(noon.Add(90*time.Minute + time.Millisecond)) {
		t.Errorf("goes on to %v", got)
	}
	last := c.Now()
	back := NewClock(noon.Add(-time.Hour), read, last) // restarted with the wall clock set back
	if got := back.Now(); !got.Equal(last) {
		t.Errorf("after a restart with the wall clock an hour back: %v, not %v", got, last)
	}
	boot += time.Second
	if got := back.Now(); !got.Equal(last.Add(time.Second)) {
		t.Errorf("and goes on to %v", got)
	}
	boot -= time.Minute // cannot happen; if it does, time stands still
	if got := back.Now(); got.Before(last.Add(time.Second)) {
		t.Errorf("went back to %v", got)
	}
}

func TestBootTimeGoesOn(t *testing.T) {
	if a, b := BootTime(), BootTime(); a <= 0 || b < a {
		t.Errorf("%v, then %v", a, b)
	}
}
