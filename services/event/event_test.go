package event

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

func TestChangesAreCollectedUntilTaken(t *testing.T) {
	b := New()
	all := b.Subscribe(Filter{Topic: Workspaces})
	ana := b.Subscribe(Filter{Topic: Workspaces, Owner: "ana"})
	one := b.Subscribe(Filter{Topic: Workspaces, Workspace: "w1"})
	hosts := b.Subscribe(Filter{Topic: Hosts})
	for range 1000 { // nobody reads, and nobody waits
		b.WorkspaceChanged("w1", "ana")
		b.WorkspaceChanged("w2", "bo")
		b.WorkspaceChanged("w3", "ana")
	}
	for _, c := range []struct {
		sub  *Subscription
		want []string
	}{{all, []string{"w1", "w2", "w3"}}, {ana, []string{"w1", "w3"}}, {one, []string{"w1"}}, {hosts, nil}} {
		woken := len(c.sub.Changed()) == 1
		if ids, many := c.sub.Take(); !slices.Equal(ids, c.want) || many || woken != (len(c.want) > 0) {
			t.Errorf("%+v took %v, %v, woken %v", c.sub.filter, ids, many, woken)
		}
		if ids, many := c.sub.Take(); len(ids) > 0 || many || len(c.sub.Changed()) > 0 {
			t.Errorf("%+v took %v twice", c.sub.filter, ids)
		}
	}
}

func TestTooManyChangesBecomeAll(t *testing.T) {
	b := New()
	s := b.Subscribe(Filter{Topic: Workspaces})
	for i := range mostChanged + 1 {
		b.WorkspaceChanged(fleet.WorkspaceID(fmt.Sprint(i)), "ana")
	}
	if ids, all := s.Take(); !all || len(ids) > 0 {
		t.Errorf("took %d ids, all %v", len(ids), all)
	}
	b.WorkspaceChanged("w1", "ana")
	if ids, all := s.Take(); all || !slices.Equal(ids, []string{"w1"}) {
		t.Errorf("after that: %v, %v", ids, all)
	}
}

func TestClosedSubscriptionsAreForgotten(t *testing.T) {
	b := New()
	s := b.Subscribe(Filter{Topic: Hosts})
	s.Close()
	s.Close()
	b.HostChanged("h1")
	if len(b.subs) != 0 || len(s.Changed()) != 0 {
		t.Error("a closed subscription is still told")
	}
}

func TestEachSendsAtOnceAfterChangesAndAsKeepAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New()
		ctx, cancel := context.WithCancelCause(t.Context())
		sent := make(chan time.Duration, 10)
		start := time.Now()
		ended := make(chan error, 1)
		go func() {
			ended <- b.Each(ctx, Filter{Topic: Hosts}, 15*time.Second, func() error { sent <- time.Since(start); return nil })
		}()
		synctest.Wait()
		time.Sleep(time.Second) //nolint:forbidigo // the bubble's clock
		b.HostChanged("h1")
		b.HostChanged("h2")
		time.Sleep(20 * time.Second) //nolint:forbidigo // the bubble's clock
		reason := errors.New("gone")
		cancel(reason)
		if err := <-ended; !errors.Is(err, reason) {
			t.Errorf("ended with %v", err)
		}
		close(sent)
		var at []time.Duration
		for d := range sent {
			at = append(at, d)
		}
		if want := []time.Duration{0, time.Second, 16 * time.Second}; !slices.Equal(at, want) {
			t.Errorf("sent at %v, want %v", at, want)
		}
	})
}

func TestEachEndsWhenSendFails(t *testing.T) {
	failed := errors.New("stream broke")
	if err := New().Each(t.Context(), Filter{Topic: Pools}, time.Hour, func() error { return failed }); !errors.Is(err, failed) {
		t.Errorf("ended with %v", err)
	}
}
