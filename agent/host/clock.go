package host

import "time"

// Moment is a point in time as this host counts it. Two moments of one boot differ by Up, which no one can set; across boots
// only Wall is left.
type Moment struct {
	Boot string        `json:"boot,omitempty"` // kernel's boot id; empty: before this boot, by the wall clock only
	Up   time.Duration `json:"up,omitempty"`   // CLOCK_BOOTTIME
	Wall time.Time     `json:"wall,omitzero"`
}

// Clock tells the time.
type Clock interface {
	Now() Moment
}

// IsZero reports whether the moment is unknown.
func (m Moment) IsZero() bool { return m.Wall.IsZero() && m.Boot == "" }

// Sub is how long before m the other moment was, never negative.
func (m Moment) Sub(other Moment) time.Duration {
	if m.Boot != "" && m.Boot == other.Boot {
		return max(m.Up-other.Up, 0)
	}
	return max(m.Wall.Sub(other.Wall), 0)
}

// age is a known moment's distance to now.
func age(now, then Moment) *time.Duration {
	if then.IsZero() {
		return nil
	}
	d := now.Sub(then)
	return &d
}

// at places a wall time that the engine reports on the host's own time line. It is exact while the wall clock was not set
// between the event and now.
func (m Moment) at(wall time.Time) Moment {
	up := m.Up - m.Wall.Sub(wall)
	if up < 0 {
		return Moment{Wall: wall}
	}
	return Moment{Boot: m.Boot, Up: up, Wall: wall}
}

// clamp moves a moment into [low, high], as far as they are of the same boot: an event lies between the last time that the
// opposite was seen and now, whatever the wall clock did.
func (m Moment) clamp(low, high Moment) Moment {
	if m.Boot == "" || m.Boot != high.Boot {
		if !low.IsZero() && low.Boot == high.Boot {
			return low
		}
		return m
	}
	if m.Up > high.Up {
		m = high
	}
	if low.Boot == m.Boot && m.Up < low.Up {
		m = low
	}
	return m
}
