package tunnel

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"github.com/carrel-dev/carrel/proto/stream"
)

// Who says whose stream it is and where it goes: what it is closed by. Fields
// that do not apply stay empty.
type Who struct {
	User      string // id
	Token     string // id of the token or device key that opened it
	Workspace string // id
	Host      string // id
	Kind      string // "ssh", "app", ...
}

// entry is one open stream of a user.
type entry struct {
	who      Who
	closer   func(cause error)
	up, down atomic.Int64
}

// liveSet is the open streams, guarded by Tunnel.mu.
type liveSet struct {
	all         map[*entry]struct{}
	byWorkspace map[string]map[*entry]struct{}
	perUser     map[string]int

	opened   int64
	up, down int64 // of streams that have ended
}

func newLiveSet() liveSet {
	return liveSet{
		all:         map[*entry]struct{}{},
		byWorkspace: map[string]map[*entry]struct{}{},
		perUser:     map[string]int{},
	}
}

func (s *liveSet) add(e *entry) {
	s.all[e] = struct{}{}
	s.perUser[e.who.User]++
	s.opened++
	if id := e.who.Workspace; id != "" {
		if s.byWorkspace[id] == nil {
			s.byWorkspace[id] = map[*entry]struct{}{}
		}
		s.byWorkspace[id][e] = struct{}{}
	}
}

func (s *liveSet) remove(e *entry) {
	delete(s.all, e)
	s.up += e.up.Load()
	s.down += e.down.Load()
	if s.perUser[e.who.User]--; s.perUser[e.who.User] == 0 {
		delete(s.perUser, e.who.User)
	}
	if of := s.byWorkspace[e.who.Workspace]; of != nil {
		delete(of, e)
		if len(of) == 0 {
			delete(s.byWorkspace, e.who.Workspace)
		}
	}
}

func (s *liveSet) match(f func(Who) bool) []*entry {
	var found []*entry
	for e := range s.all {
		if f(e.who) {
			found = append(found, e)
		}
	}
	return found
}

func (s *liveSet) stats() Stats {
	st := Stats{Streams: len(s.all), Opened: s.opened, Up: s.up, Down: s.down}
	for e := range s.all {
		st.Up += e.up.Load()
		st.Down += e.down.Load()
	}
	return st
}

// Track puts a stream that is relayed elsewhere (an app's, a log's) into the
// live set. closer must end the stream and not wait for its end; it may be
// called more than once. The caller calls release when the stream has ended.
// It fails with ErrTooMany above the user's limit and with ErrShutdown.
func (t *Tunnel) Track(who Who, closer func(cause error)) (release func(), err error) {
	e, err := t.track(who, closer)
	if err != nil {
		return nil, err
	}
	return sync.OnceFunc(func() { t.untrack(e) }), nil
}

func (t *Tunnel) track(who Who, closer func(error)) (*entry, error) {
	e := &entry{who: who, closer: closer}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, ErrShutdown
	}
	if limit := t.o.MaxPerUser; who.User != "" && limit >= 0 && t.live.perUser[who.User] >= limit {
		return nil, fmt.Errorf("user %s: %w: %d are open, close some first", who.User, ErrTooMany, limit)
	}
	t.live.add(e)
	return e, nil
}

func (t *Tunnel) untrack(e *entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.live.remove(e)
}

// Join tracks and relays a user's stream to a host's until both ways have
// ended, ctx ends, or it is closed as one of Who; it closes both connections
// before it returns. Stats.AToB is what went to the host. The error is nil
// after orderly ends, else as stream.Relay says: the reason given to a Close
// method, stream.ErrStalled, ErrTooMany, ...
func (t *Tunnel) Join(ctx context.Context, userConn, hostConn net.Conn, who Who) (stream.Stats, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	e, err := t.track(who, cancel)
	if err != nil {
		closeAll([]net.Conn{userConn, hostConn})
		return stream.Stats{}, err
	}
	return t.relay(ctx, userConn, hostConn, e)
}

func (t *Tunnel) relay(ctx context.Context, userConn, hostConn net.Conn, e *entry) (stream.Stats, error) {
	defer t.untrack(e)
	o := t.o.Relay
	o.AToB, o.BToA = &e.up, &e.down
	return stream.Relay(ctx, userConn, hostConn, o)
}

// Go is Join in a goroutine that Shutdown waits for, so that the handler which
// accepted userConn can return and its request's memory is freed: an idle
// stream then costs half as much. ended, unless nil, is told the result.
func (t *Tunnel) Go(userConn, hostConn net.Conn, who Who, ended func(stream.Stats, error)) error {
	// The stream outlives the request, so no context of it is wanted here.
	ctx, cancel := context.WithCancelCause(context.Background())
	e, err := t.track(who, cancel)
	if err == nil {
		if err = t.begin(); err != nil {
			t.untrack(e)
		}
	}
	if err != nil {
		cancel(err)
		closeAll([]net.Conn{userConn, hostConn})
		return err
	}
	go func() {
		defer t.running.Done()
		defer cancel(nil)
		stats, err := t.relay(ctx, userConn, hostConn, e)
		if ended != nil {
			ended(stats, err)
		}
	}()
	return nil
}

// CloseUser ends the user's streams, CloseToken those opened by a token or
// device key, CloseWorkspace those to a workspace. Each returns their number;
// the streams end with reason at once.
func (t *Tunnel) CloseUser(user string, reason error) int {
	return t.closeMatching(reason, func(w Who) bool { return w.User == user })
}

// CloseToken: see CloseUser.
func (t *Tunnel) CloseToken(token string, reason error) int {
	return t.closeMatching(reason, func(w Who) bool { return w.Token == token })
}

// CloseWorkspace: see CloseUser.
func (t *Tunnel) CloseWorkspace(id string, reason error) int {
	return t.closeMatching(reason, func(w Who) bool { return w.Workspace == id })
}

func (t *Tunnel) closeMatching(reason error, f func(Who) bool) int {
	t.mu.Lock()
	found := t.live.match(f)
	t.mu.Unlock()
	for _, e := range found {
		e.closer(reason)
	}
	return len(found)
}

// Live is what a workspace's open streams add up to: an idle detection compares
// two of them. Bytes go down when a stream ends.
type Live struct {
	Streams  int
	Up, Down int64 // bytes so far of the streams that are open
}

// Live returns the open streams of a workspace.
func (t *Tunnel) Live(workspace string) Live {
	t.mu.Lock()
	defer t.mu.Unlock()
	var l Live
	for e := range t.live.byWorkspace[workspace] {
		l.Streams++
		l.Up += e.up.Load()
		l.Down += e.down.Load()
	}
	return l
}
