package docker_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/docker"
	"github.com/carrel-dev/carrel/agent/docker/dockertest"
	"github.com/carrel-dev/carrel/agent/host"
)

// private starts an engine of the test's own that has busybox.
func private(t *testing.T, config string) *dockertest.Engine {
	t.Helper()
	p := dockertest.Start(t, config)
	p.Load(raw(t), busybox)
	return p
}

// GPU-06, T-18: what reaches nvidia's hook is exactly the lease; an image that wants all and leases none gets void.
func TestGPU06DevicesReachTheHook(t *testing.T) {
	p := private(t, "{}")
	c := open(t, func(o *docker.Options) { o.Host = p.Host })
	probe, err := c.Probe(t.Context(), host.ProbeRequest{InitFile: carrelInit(t), Device: "GPU-probe"})
	if err != nil || probe.GPU != "" {
		t.Fatalf("probe: %+v, %v", probe, err)
	}
	if got := p.Seen(); !strings.Contains(got, "GPU-probe") {
		t.Errorf("the hook saw %q", got)
	}
	const hostile = "hosttest/hostile:local"
	p.Derive(busybox, hostile, "ENV NVIDIA_VISIBLE_DEVICES=all", "ENV NVIDIA_DRIVER_CAPABILITIES=all", "LABEL dev.carrel.host=x dev.carrel.signature=y")
	for i, s := range []struct {
		gpus []string
		want string
	}{
		{[]string{"GPU-aaaa", "GPU-bbbb"}, "NVIDIA_VISIBLE_DEVICES=GPU-aaaa,GPU-bbbb\n"},
		{nil, ""},
	} {
		p.Forget()
		k := host.Key{Workspace: word(), Epoch: int64(i) + 1}
		sp := spec(t, k, hostile, script(t, "#!/bin/sh\necho visible=$NVIDIA_VISIBLE_DEVICES\n"+strings.TrimPrefix(standIn, "#!/bin/sh\n")))
		sp.GPUs = s.gpus
		visible := "void"
		if len(s.gpus) > 0 {
			visible = strings.Join(s.gpus, ",")
		}
		sp.Env = []string{"NVIDIA_VISIBLE_DEVICES=" + visible}
		id, err := c.Create(t.Context(), sp)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if got := p.Seen(); !strings.HasSuffix(got, s.want) || s.want == "" && got != "" {
			t.Errorf("lease %v: the hook saw %q", s.gpus, got)
		}
		waitLine(t, c, id, "visible="+visible)
		if err := c.Remove(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
}

func waitLine(t *testing.T, c *docker.Client, id, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	found := errors.New("found")
	err := c.Logs(ctx, id, host.LogQuery{Follow: true}, func(_ time.Time, line string) error {
		if line == want {
			return found
		}
		return nil
	})
	if !errors.Is(err, found) {
		t.Errorf("no line %q: %v", want, err)
	}
}

// the engine dies under a running workspace, with live-restore and without. With it nothing ends; without, each end is
// told with the engine's time. A stopped engine is silence and nothing more.
func TestR5EngineDies(t *testing.T) {
	for _, restore := range []bool{true, false} {
		t.Run(fmt.Sprintf("live restore %v", restore), func(t *testing.T) {
			p := private(t, fmt.Sprintf(`{"live-restore": %v}`, restore))
			c := open(t, func(o *docker.Options) { o.Host, o.Call, o.Slow = p.Host, time.Second, 10*time.Second })
			img, err := c.Image(t.Context(), busybox)
			if err != nil {
				t.Fatal(err)
			}
			h := newHost(t, c)
			run := host.Desired{
				Key: host.Key{Workspace: word(), Epoch: 1}, Goal: host.GoalRunning, Name: "demo", Owner: "ana", ImageReference: busybox, ImageDigest: img.ID,
				Identity: host.Identity{Login: "ana", UID: 54321, GID: 54321}, CPUMillis: 500, MemoryMiB: 64, ShmMiB: 16, PidsLimit: 64, StopGrace: time.Second,
			}
			if _, err := h.Apply(t.Context(), host.Stamp{Database: 1}, host.Set{Runs: []host.Desired{run}}); err != nil {
				t.Fatal(err)
			}
			before := settle(t, h, run.Key, host.PhaseReady)
			p.Signal(syscall.SIGSTOP)
			silent(t, h, run.Key)
			p.Signal(syscall.SIGCONT)
			sig := syscall.SIGTERM
			if restore {
				sig = syscall.SIGKILL
			}
			p.End(sig)
			p.EndContainerd()
			p.Begin()
			if !restore {
				o := settle(t, h, run.Key, host.PhaseGone)
				if o.EndedAge == nil || o.EndedUnattested {
					t.Errorf("%+v", o)
				}
				return
			}
			after := settle(t, h, run.Key, host.PhaseReady, host.PhaseGone)
			if after.Phase != host.PhaseReady || after.ContainerID != before.ContainerID {
				t.Errorf("before %+v, after %+v", before, after)
			}
		})
	}
}

// silent waits until a run is told with an engine that gives no answer; it must stay as it is.
func silent(t *testing.T, h *host.Host, k host.Key) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	found := errors.New("found")
	for ctx.Err() == nil {
		err := h.Observe(ctx, 0, time.Second, func(b host.Batch) error {
			for _, o := range b.Runs {
				if o.Key == k && (o.Phase != host.PhaseReady || o.EndedAge != nil) {
					t.Errorf("guessed: %+v", o)
				}
				if o.Key == k && o.EngineSilent != nil {
					return found
				}
			}
			return nil
		})
		if errors.Is(err, found) {
			return
		}
	}
	t.Error("the silence is not told")
}
