// Package usage is the ledger's arithmetic: whole milliseconds in, whole milliseconds and millionths of a currency unit out.
package usage

import (
	"cmp"
	"slices"

	"github.com/carrel-dev/carrel/services/fleet"
)

// HourMs is the length of an activity bucket and of a rate's unit in milliseconds.
const HourMs = 3_600_000

// Key is what a moment of device time is billed to.
type Key struct {
	User     fleet.UserID
	UserName string
	Project  string
	Pool     string
	Model    string
}

// Change is a fact from whose At on a lease is billed to another key.
type Change struct {
	At  int64 // unix milliseconds
	Key Key
}

// Hour is what samples saw of a lease in one UTC hour.
type Hour struct {
	Start    int64 // unix milliseconds
	ActiveMs int64
	IdleMs   int64
}

// Lease is one lease with its facts; times in unix milliseconds.
type Lease struct {
	ID          int64
	Device      string
	Workspace   string // `owner/name`
	Key         Key    // as the open fact says
	Start       int64
	End         int64 // of no meaning while Open
	Open        bool
	Provisional bool // its end may still move
	Simulated   bool // costs nothing
	Changes     []Change
	Hours       []Hour // by Start; what is missing is unknown
	// Whole says that ActiveMs and IdleMs stand for all Hours, which are then left out; only for a lease that Splits does not cut.
	Whole            bool
	ActiveMs, IdleMs int64
}

// Segment is a part of a lease that is billed to one key: [From, To).
type Segment struct {
	From, To int64
	Key      Key
}

// end is where the lease's billed time ends, now for an open one.
func (l *Lease) end(now int64) int64 {
	if l.Open {
		return max(now, l.Start)
	}
	return max(l.End, l.Start)
}

// Segments derives what is billed from the facts: from a fact's At to the earlier of the next change and the end, never negative. So
// a change that came after an end that was learnt late takes nothing. The lengths' sum is the lease's length.
func (l *Lease) Segments(now int64) []Segment {
	end := l.end(now)
	if len(l.Changes) == 0 {
		return []Segment{{From: l.Start, To: end, Key: l.Key}}
	}
	changes := slices.Clone(l.Changes)
	slices.SortStableFunc(changes, func(a, b Change) int { return cmp.Compare(a.At, b.At) })
	segments := make([]Segment, 0, len(changes)+1)
	from, key := l.Start, l.Key
	for _, c := range changes {
		at := min(max(c.At, l.Start), end)
		if at > from {
			segments = append(segments, Segment{From: from, To: at, Key: key})
			from = at
		}
		key = c.Key
	}
	if end > from || len(segments) == 0 {
		segments = append(segments, Segment{From: from, To: end, Key: key})
	}
	return segments
}

// activity is how much of [from, to) was active and idle.
func (l *Lease) activity(from, to, now int64) (active, idle int64) {
	if l.Whole {
		return l.ActiveMs, l.IdleMs
	}
	first, _ := slices.BinarySearchFunc(l.Hours, from-HourMs+1, func(h Hour, at int64) int { return cmp.Compare(h.Start, at) })
	for _, h := range l.Hours[first:] {
		if h.Start >= to {
			break
		}
		begin, end := max(h.Start, l.Start), min(h.Start+HourMs, l.end(now))
		if end <= begin {
			continue
		}
		x, y := clamp(from, begin, end)-begin, clamp(to, begin, end)-begin
		activeX, idleX := h.until(x, end-begin)
		activeY, idleY := h.until(y, end-begin)
		active += activeY - activeX
		idle += idleY - idleX
	}
	return active, idle
}

// until is how much of the first x milliseconds of the lease's part of the hour was active and idle. What samples saw is spread evenly:
// of x milliseconds floor(seen * x / part) were seen, and of the first n that were seen floor(active * n / seen) were active. Both
// only grow, so that adjoining windows add up exactly and nothing is negative or longer than its window.
func (h Hour) until(x, part int64) (active, idle int64) {
	a := min(h.ActiveMs, part)
	seen := a + min(h.IdleMs, part-a)
	if seen <= 0 {
		return 0, 0
	}
	n := seen * x / part
	active = a * n / seen
	return active, n - active
}

func clamp(v, low, high int64) int64 { return min(max(v, low), high) }
