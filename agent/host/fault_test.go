package host_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/host"
	"github.com/carrel-dev/carrel/agent/host/hosttest"
)

// the N-th call fails, hangs until its limit, or loses its answer, for each N of a start and a stop.
func TestR6EveryCallFails(t *testing.T) {
	kinds := map[string]func(e *hosttest.Engine, nth int){
		"no answer":    func(e *hosttest.Engine, nth int) { e.Fail(failNth(nth, host.KindUnavailable), nil) },
		"lost answer":  func(e *hosttest.Engine, nth int) { e.Fail(nil, failNth(nth, host.KindUnavailable)) },
		"engine error": func(e *hosttest.Engine, nth int) { e.Fail(failNth(nth, host.KindInternal), nil) },
	}
	for name, inject := range kinds {
		t.Run(name, func(t *testing.T) {
			for nth := 1; nth <= 16; nth++ {
				bubble(t, func(t *testing.T, r *rig) {
					d := run("w1", 1)
					inject(r.engine, nth)
					r.apply(d)
					o := r.within(time.Minute, d.Key, "settled", func(o host.Observed) bool { return o.Phase == host.PhaseReady || o.Phase == host.PhaseGone })
					if o.Phase == host.PhaseGone && name != "engine error" {
						t.Errorf("call %d: %+v", nth, o)
					}
					if names := r.engine.Names(); len(names) > 1 || len(names) == 0 && o.Phase == host.PhaseReady {
						t.Errorf("call %d: containers %v at %s", nth, names, o.Phase)
					}
					inject(r.engine, nth)
					r.apply(gone(d))
					r.gone(d.Key)
					pass(30 * time.Second)
					r.wantNames()
				})
			}
		})
	}
}

func failNth(nth int, kind host.Kind) func(string) error {
	var mu sync.Mutex
	return func(call string) error {
		mu.Lock()
		defer mu.Unlock()
		nth--
		if nth == 0 {
			return host.Errorf(kind, "%s fails", call)
		}
		return nil
	}
}

// The agent dies at each call of a start and of a stop.
func TestAgentDiesAtEveryCall(t *testing.T) {
	for nth := 1; nth <= 14; nth++ {
		bubble(t, func(t *testing.T, r *rig) {
			d := run("w1", 1)
			for _, want := range []host.Desired{d, gone(d)} {
				died := make(chan struct{})
				fail := failNth(nth, host.KindUnavailable)
				var once sync.Once
				r.engine.Fail(nil, func(call string) error {
					if fail(call) != nil {
						once.Do(func() { close(died) })
						return context.Canceled
					}
					return nil
				})
				r.apply(want)
				select {
				case <-died:
				case <-time.After(30 * time.Second):
				}
				r.restart()
				r.engine.Fail(nil, nil)
				r.stamp.Session++
				r.apply(want)
				if want.Goal == host.GoalRunning {
					r.ready(d.Key)
					r.wantNames("carrel-w1-1")
				} else {
					r.gone(d.Key)
					r.wantNames()
				}
			}
		})
	}
}

func TestBrokenJournalIsAnError(t *testing.T) {
	dir := t.TempDir()
	now := host.Moment{Boot: "b", Wall: time.Now()}
	j, err := host.OpenJournal(dir, now)
	if err != nil {
		t.Fatal(err)
	}
	j.Change(host.Key{Workspace: "w1", Epoch: 1}, func(r *host.Record) { r.Phase = host.PhaseReady })
	if err := j.Commit(); err != nil {
		t.Fatal(err)
	}
	first, _ := j.Seq()
	again, err := host.OpenJournal(dir, now)
	if err != nil || again.ID() != j.ID() {
		t.Fatalf("again: %v", err)
	}
	if seq, _ := again.Seq(); seq <= first {
		t.Errorf("numbers go on at %d after %d", seq, first)
	}
	path := filepath.Join(dir, "journal.json")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, whole[:len(whole)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := host.OpenJournal(dir, now); err == nil || !strings.Contains(err.Error(), "move it away") {
		t.Errorf("torn: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".journal*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestObserveInParts(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		for i := range 2500 {
			r.journal.Change(host.Key{Workspace: fmt.Sprintf("x%d", i), Epoch: 1}, func(rec *host.Record) { rec.Phase = host.PhaseGone })
		}
		told := map[host.Key]int{}
		var after int64
		for call := 1; ; call++ {
			s := r.observe(after)
			for _, k := range keys(s.runs) {
				told[k]++
			}
			if s.seq < after {
				t.Fatalf("the number fell from %d to %d", after, s.seq)
			}
			if after = s.seq; len(s.runs) < host.ObserveRecords {
				break
			}
			if call > 5 {
				t.Fatal("it does not end")
			}
		}
		if len(told) != 2500 {
			t.Errorf("%d of 2500 told", len(told))
		}
		for k, n := range told {
			if n != 1 {
				t.Errorf("%s told %d times", k, n)
			}
		}
		// A change comes while the call waits.
		done := make(chan error, 1)
		got := make(chan host.Observed, 1)
		stop := errors.New("enough")
		go func() {
			done <- r.host.Observe(t.Context(), after, 10*time.Second, func(b host.Batch) error {
				if len(b.Runs) > 0 {
					got <- b.Runs[0]
					return stop
				}
				return nil
			})
		}()
		pass(time.Second)
		r.journal.Change(host.Key{Workspace: "new", Epoch: 1}, func(rec *host.Record) { rec.Phase = host.PhaseStarting })
		if o := <-got; o.Key.Workspace != "new" {
			t.Errorf("%+v", o)
		}
		if err := <-done; !errors.Is(err, stop) {
			t.Error(err)
		}
	})
}
