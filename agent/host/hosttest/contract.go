package hosttest

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/host"
)

// Bench is an engine under test and what the contract needs beside it.
type Bench struct {
	Runtime host.Runtime
	// Image is an image that the engine has, by reference. A container of it runs until it is stopped, and writes lines.
	Image string
	// Lines are the last lines that it writes.
	Lines []string
	// Key is unused so far; the contract uses epochs from 1 on.
	Key func(epoch int64) host.Key
	// Spec completes a spec with what the engine needs.
	Spec func(t *testing.T, k host.Key, image string) host.Spec
	// Kill ends a container with SIGKILL, and Vanish removes it, both as somebody else would.
	Kill, Vanish func(t *testing.T, name string)
}

// patience bounds what an engine may take for one act.
const patience = 30 * time.Second

// Contract runs the contract of [host.Runtime].
func Contract(t *testing.T, open func(t *testing.T) Bench) {
	t.Helper()
	for name, check := range map[string]func(*testing.T, Bench){
		"what is not there is not found":                absentThings,
		"a name is given once":                          oneName,
		"a life: created, running, exited, removed":     life,
		"events tell of deaths from outside":            deaths,
		"the last lines can be read":                    lastLines,
		"a volume's name stands for one directory":      volumeNames,
		"images are found by reference and by id":       imageNames,
		"a cancelled call is an error and does nothing": cancelled,
	} {
		t.Run(name, func(t *testing.T) { check(t, open(t)) })
	}
}

func (b Bench) create(t *testing.T, epoch int64) (id string, k host.Key) {
	t.Helper()
	image, err := b.Runtime.Image(t.Context(), b.Image)
	if err != nil {
		t.Fatal(err)
	}
	k = b.Key(epoch)
	id, err = b.Runtime.Create(t.Context(), b.Spec(t, k, image.ID))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Runtime.Remove(context.Background(), id); err != nil {
			t.Errorf("remove: %v", err)
		}
	})
	return id, k
}

func (b Bench) start(t *testing.T, epoch int64) (id string, k host.Key) {
	t.Helper()
	id, k = b.create(t, epoch)
	if err := b.Runtime.Start(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	return id, k
}

func (b Bench) inspect(t *testing.T, idOrName string) host.Container {
	t.Helper()
	c, err := b.Runtime.Inspect(t.Context(), idOrName)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func wantKind(t *testing.T, act string, err error, want host.Kind) {
	t.Helper()
	if got := host.KindOf(err); got != want {
		t.Errorf("%s: error %v is of kind %q, want %q", act, err, got, want)
	}
}

func absentThings(t *testing.T, b Bench) {
	ctx, k := t.Context(), b.Key(1)
	_, err := b.Runtime.Inspect(ctx, k.Container())
	wantKind(t, "inspect", err, host.KindNotFound)
	_, err = b.Runtime.Image(ctx, ID("no such image"))
	wantKind(t, "image", err, host.KindNotFound)
	_, err = b.Runtime.Create(ctx, b.Spec(t, k, ID("no such image")))
	wantKind(t, "create", err, host.KindNotFound)
	wantKind(t, "start", b.Runtime.Start(ctx, k.Container()), host.KindNotFound)
	wantKind(t, "remove", b.Runtime.Remove(ctx, k.Container()), "")
	wantKind(t, "remove volume", b.Runtime.RemoveVolume(ctx, "carrel-"+k.Workspace), "")
	err = b.Runtime.Logs(ctx, k.Container(), host.LogQuery{}, func(time.Time, string) error { return nil })
	wantKind(t, "logs", err, host.KindNotFound)
}

func oneName(t *testing.T, b Bench) {
	id, k := b.create(t, 2)
	image, err := b.Runtime.Image(t.Context(), b.Image)
	if err != nil {
		t.Fatal(err)
	}
	_, err = b.Runtime.Create(t.Context(), b.Spec(t, k, image.ID))
	wantKind(t, "second create", err, host.KindConflict)
	if c := b.inspect(t, k.Container()); c.ID != id {
		t.Errorf("the name leads to %s, want %s", c.ID, id)
	}
}

func life(t *testing.T, b Bench) {
	ctx := t.Context()
	id, k := b.create(t, 3)
	c := b.inspect(t, id)
	if c.State != host.StateCreated || c.Name != k.Container() || !c.StartedAt.IsZero() || c.Labels[host.LabelWorkspace] != k.Workspace {
		t.Errorf("created: %+v", c)
	}
	for range 2 {
		wantKind(t, "start", b.Runtime.Start(ctx, id), "")
	}
	b.runs(t, id, k)
	for range 2 {
		wantKind(t, "stop", b.Runtime.Stop(ctx, id, 5*time.Second), "")
	}
	c = b.inspect(t, id)
	if c.State != host.StateExited || c.FinishedAt.Before(c.StartedAt) || c.PID != 0 {
		t.Errorf("stopped: %+v", c)
	}
	for range 2 {
		wantKind(t, "remove", b.Runtime.Remove(ctx, id), "")
	}
	_, err := b.Runtime.Inspect(ctx, id)
	wantKind(t, "inspect", err, host.KindNotFound)
}

// runs checks what is told of a container that runs.
func (b Bench) runs(t *testing.T, id string, k host.Key) {
	t.Helper()
	c := b.inspect(t, id)
	if !c.State.Running() || c.PID == 0 || time.Since(c.StartedAt) > patience {
		t.Errorf("running: %+v", c)
	}
	if u, err := b.Runtime.Usage(t.Context(), id); err != nil || u.MemoryBytes <= 0 {
		t.Errorf("usage %+v, %v", u, err)
	}
	list, err := b.Runtime.List(t.Context())
	if i := slices.IndexFunc(list, func(c host.Container) bool { return c.ID == id }); err != nil || i < 0 ||
		list[i].Name != k.Container() || !list[i].State.Running() || list[i].Labels[host.LabelWorkspace] != k.Workspace {
		t.Errorf("list: %+v, %v", list, err)
	}
}

func deaths(t *testing.T, b Bench) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	id, k := b.start(t, 4)
	live, seen, done := make(chan struct{}), make(chan host.Event, 64), make(chan error, 1)
	go func() {
		done <- b.Runtime.Events(ctx, time.Now(), func() { close(live) }, func(e host.Event) {
			if e.ID == id {
				seen <- e
			}
		})
	}()
	wait := func(kind host.EventKind) host.Event {
		for {
			select {
			case e := <-seen:
				if e.Kind == kind {
					return e
				}
			case <-ctx.Done():
				t.Fatalf("no %s event", kind)
			}
		}
	}
	<-live
	b.Kill(t, k.Container())
	if e := wait(host.EventDie); e.ExitCode != 137 || time.Since(e.At) > patience {
		t.Errorf("die event %+v", e)
	}
	if c := b.inspect(t, id); c.State != host.StateExited || c.ExitCode != 137 {
		t.Errorf("after the kill: %+v", c)
	}
	b.Vanish(t, k.Container())
	wait(host.EventDestroy)
	cancel()
	if err := <-done; err == nil {
		t.Error("events returned without an error")
	}
}

func lastLines(t *testing.T, b Bench) {
	id, _ := b.start(t, 5)
	deadline := time.Now().Add(patience)
	for {
		var got []string
		err := b.Runtime.Logs(t.Context(), id, host.LogQuery{Tail: len(b.Lines)}, func(at time.Time, line string) error {
			if time.Since(at) > patience {
				t.Errorf("line %q is of %s", line, at)
			}
			got = append(got, line)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if slices.Equal(got, b.Lines) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("lines %q, want %q", got, b.Lines)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func volumeNames(t *testing.T, b Bench) {
	ctx, name := t.Context(), "carrel-"+b.Key(6).Workspace+"vol"
	t.Cleanup(func() {
		if err := b.Runtime.RemoveVolume(context.Background(), name); err != nil {
			t.Errorf("remove volume: %v", err)
		}
	})
	dir := t.TempDir()
	for range 2 {
		wantKind(t, "ensure volume", b.Runtime.EnsureVolume(ctx, name, dir), "")
	}
	wantKind(t, "another directory", b.Runtime.EnsureVolume(ctx, name, t.TempDir()), host.KindConflict)
	if err := os.WriteFile(dir+"/keep", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		wantKind(t, "remove volume", b.Runtime.RemoveVolume(ctx, name), "")
	}
	if _, err := os.Stat(dir + "/keep"); err != nil {
		t.Errorf("forgetting the name took the data: %v", err)
	}
}

func imageNames(t *testing.T, b Bench) {
	byRef, err := b.Runtime.Image(t.Context(), b.Image)
	if err != nil {
		t.Fatal(err)
	}
	byID, err := b.Runtime.Image(t.Context(), byRef.ID)
	if err != nil || byID.ID != byRef.ID {
		t.Errorf("by id: %+v, %v", byID, err)
	}
}

func cancelled(t *testing.T, b Bench) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	k := b.Key(7)
	if _, err := b.Runtime.Create(ctx, b.Spec(t, k, ID("x"))); err == nil {
		t.Error("create with a cancelled context")
	}
	if _, err := b.Runtime.Inspect(ctx, k.Container()); err == nil || host.KindOf(err) == host.KindNotFound {
		t.Errorf("inspect with a cancelled context: %v", err)
	}
	if _, err := b.Runtime.List(ctx); err == nil {
		t.Error("list with a cancelled context")
	}
}
