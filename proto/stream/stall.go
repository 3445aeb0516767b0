package stream

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// stallWatch ends a pending write when its peer takes nothing for limit. A
// plain write deadline cannot tell a slow peer from a dead one, and breaks a
// TLS connection for good; so the watch looks a few times per limit at what
// the peer has acknowledged (where the system tells), and sets a deadline in
// the past only when that stood still.
type stallWatch struct {
	conn  net.Conn
	limit time.Duration
	own   atomic.Uint64 // bytes that the writer itself saw accepted

	mu    sync.Mutex
	timer *time.Timer
	armed bool
	fresh bool // no reading taken since arm
	since time.Time
	last  progress
	fired bool
}

// progress is a reading of how far the peer has come; equal ones mean that it
// did not move.
type progress struct{ own, kernel uint64 }

const stallChecks = 8 // readings per limit

// arm starts the watch before a write that may block.
func (s *stallWatch) arm() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armed, s.fresh = true, true
	if s.timer == nil {
		s.timer = time.AfterFunc(s.limit/stallChecks, s.check)
		return
	}
	s.timer.Reset(s.limit / stallChecks)
}

func (s *stallWatch) disarm() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armed = false
	s.timer.Stop()
}

// struck reports whether the watch has ended a write.
func (s *stallWatch) struck() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fired
}

func (s *stallWatch) check() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.armed {
		return
	}
	now, at := time.Now(), progress{s.own.Load(), kernelProgress(s.conn)}
	if s.fresh || at != s.last {
		s.fresh, s.since, s.last = false, now, at
	}
	if now.Sub(s.since) >= s.limit {
		s.fired = true
		_ = s.conn.SetWriteDeadline(time.Unix(1, 0)) // fails only where the write has ended anyway
		return
	}
	s.timer.Reset(s.limit / stallChecks)
}
