// Package event wakes those who watch: a bounded broker that tells what changed, never how, so that a slow watcher catches up in one step.
package event

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Topic is a set of things that can be watched.
type Topic string

// The topics.
const (
	Workspaces Topic = "workspaces"
	Hosts      Topic = "hosts"
	Devices    Topic = "devices"
	Pools      Topic = "pools"
)

// mostChanged is how many changed ids a subscription remembers before it only says that everything may have changed.
const mostChanged = 1024

// Filter chooses what wakes a subscription. Workspace and Owner narrow the topic Workspaces; empty: all.
type Filter struct {
	Topic     Topic
	Workspace fleet.WorkspaceID
	Owner     fleet.UserID
}

// Broker tells subscriptions of changes. A publisher never waits for a watcher, and no goroutine stands behind a subscription.
type Broker struct {
	mu   sync.Mutex
	subs map[Filter]map[*Subscription]struct{}
}

// New returns a broker without watchers.
func New() *Broker { return &Broker{subs: map[Filter]map[*Subscription]struct{}{}} }

// Subscription collects changes until they are taken.
type Subscription struct {
	broker *Broker
	filter Filter
	wake   chan struct{} // one place: full means that there is something to take

	changed map[string]struct{} // guarded by broker.mu, as is all
	all     bool
}

// Subscribe begins to collect changes; Close ends it. What happened before is not told: look first at the state after subscribing.
func (b *Broker) Subscribe(f Filter) *Subscription {
	s := &Subscription{broker: b, filter: f, wake: make(chan struct{}, 1), changed: map[string]struct{}{}}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.subs[f] == nil {
		b.subs[f] = map[*Subscription]struct{}{}
	}
	b.subs[f][s] = struct{}{}
	return s
}

// Close ends the subscription. It may be called more than once.
func (s *Subscription) Close() {
	b := s.broker
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.subs[s.filter], s)
	if len(b.subs[s.filter]) == 0 {
		delete(b.subs, s.filter)
	}
}

// Changed is readable when Take has something.
func (s *Subscription) Changed() <-chan struct{} { return s.wake }

// Take returns the ids that changed since the last Take, sorted, each once however often it changed. all means that there were too
// many, so that everything must be looked at again.
func (s *Subscription) Take() (ids []string, all bool) {
	b := s.broker
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-s.wake:
	default:
	}
	all = s.all
	if !all {
		for id := range s.changed {
			ids = append(ids, id)
		}
	}
	clear(s.changed)
	s.all = false
	slices.Sort(ids)
	return ids, all
}

// add notes a change; the broker's lock is held.
func (s *Subscription) add(id string) {
	switch {
	case s.all:
	case id == "" || len(s.changed) >= mostChanged:
		s.all = true
		clear(s.changed)
	default:
		s.changed[id] = struct{}{}
	}
	select {
	case s.wake <- struct{}{}:
	default: // already woken, not yet taken
	}
}

// WorkspaceChanged tells that a workspace, its queue place or its pull progress changed.
func (b *Broker) WorkspaceChanged(id fleet.WorkspaceID, owner fleet.UserID) {
	b.publish(string(id), Filter{Topic: Workspaces}, Filter{Topic: Workspaces, Workspace: id}, Filter{Topic: Workspaces, Owner: owner})
}

// HostChanged tells that a host, and with it its pool, changed.
func (b *Broker) HostChanged(id fleet.HostID) {
	b.publish(string(id), Filter{Topic: Hosts})
	b.publish("", Filter{Topic: Pools})
}

// DevicesChanged tells that devices, or what was measured on them, changed.
func (b *Broker) DevicesChanged() { b.publish("", Filter{Topic: Devices}) }

// PoolChanged tells that a pool changed.
func (b *Broker) PoolChanged(name string) { b.publish(name, Filter{Topic: Pools}) }

func (b *Broker) publish(id string, filters ...Filter) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, f := range filters {
		if slices.Contains(filters[:i], f) {
			continue
		}
		for s := range b.subs[f] {
			s.add(id)
		}
	}
}

// Each calls send at once, then after every change that the filter lets through (several changes may be one call) and after every
// keepAlive without one, until ctx ends or send fails; it returns why.
func (b *Broker) Each(ctx context.Context, f Filter, keepAlive time.Duration, send func() error) error {
	sub := b.Subscribe(f)
	defer sub.Close()
	timer := time.NewTimer(keepAlive)
	defer timer.Stop()
	for {
		if err := send(); err != nil {
			return err
		}
		timer.Reset(keepAlive)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C:
		case <-sub.Changed():
			sub.Take()
		}
	}
}
