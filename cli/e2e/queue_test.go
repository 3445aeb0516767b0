package e2e

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// afterStop is how long a waiting workspace may need to start by itself after another's `stopped`. On an idle machine it takes less than
// 2 s, which `make bench` shows; here it is bounded for a busy one.
const afterStop = 20 * time.Second

// TestQueue holds that four workspaces get four devices and a fifth waits, with place and reason, until one of them stops.
func TestQueue(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	ana := l.admin
	l.fillGPUs(ana, "w1", "w2", "w3", "w4")
	held := map[string]string{}
	for _, name := range []string{"w1", "w2", "w3", "w4"} {
		w := ana.waitState(name, "running")
		if len(w.Devices) != 1 || held[w.Devices[0].ID] != "" {
			t.Fatalf("%s holds %v; taken before: %v", name, w.Devices, held)
		}
		held[w.Devices[0].ID] = name
	}

	ana.ok("up", "w5", "-d", "-q")
	var waiting shown
	l.eventually("w5 says why it waits", func() bool { waiting = ana.show("w5"); return waiting.Queue.Why != "" })
	if waiting.State != "queued" || waiting.Queue.Place != 1 || !strings.Contains(waiting.Queue.Why, "all 4 GPUs") || !strings.Contains(waiting.Queue.Why, "in use") {
		t.Errorf("w5 is %s, place %d, %q; want queued, place 1, and that all 4 GPUs are in use", waiting.State, waiting.Queue.Place, waiting.Queue.Why)
	}
	if list := ana.ok("ls"); !strings.Contains(list, "queued (1 of 1)") || !strings.Contains(list, "all 4 GPUs") {
		t.Errorf("ls does not tell place and reason:\n%s", list)
	}
	ana.ok("up", "cpu", "--gpu", "0", "--cpus", "0.1", "--memory", "128M", "-q")
	if w := ana.show("cpu"); w.State != "running" || len(w.Leases) != 0 {
		t.Errorf("the workspace without GPU is %s with leases %v", w.State, w.Leases)
	}

	// A restart keeps its device although another waits for one.
	before := ana.show("w1")
	ana.ok("restart", "w1", "-q")
	after := ana.show("w1")
	if after.Run.Epoch != before.Run.Epoch+1 || after.Devices[0].ID != before.Devices[0].ID {
		t.Errorf("restart made of epoch %d on %s epoch %d on %s", before.Run.Epoch, before.Devices[0].ID, after.Run.Epoch, after.Devices[0].ID)
	}
	if w := ana.show("w5"); w.State != "queued" || w.Queue.Place != 1 {
		t.Errorf("after the restart of another w5 is %s, place %d", w.State, w.Queue.Place)
	}

	ana.ok("stop", "w2", "-d")
	ana.waitState("w2", "stopped")
	stopped := time.Now()
	w := ana.waitState("w5", "running")
	t.Logf("w5 runs %v after another's stopped (waited for: %v)", time.Since(stopped).Round(time.Millisecond), w.Run.StartedAt.Sub(lastLease(t, ana.show("w2")).EndedAt).Round(time.Millisecond))
	if took := time.Since(stopped); took > afterStop {
		t.Errorf("w5 started %v after another had stopped", took)
	}
	if held[w.Devices[0].ID] != "w2" {
		t.Errorf("w5 holds %s, which was %s's", w.Devices[0].ID, held[w.Devices[0].ID])
	}
	checkNoDoubleLease(t, ana, "w1", "w2", "w3", "w4", "w5")
}

// TestInterruptedUp holds that Ctrl-C ends the waiting, not the workspace, and says so.
func TestInterruptedUp(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	ana := l.admin
	l.fillGPUs(ana, "w1", "w2", "w3", "w4")
	up := ana.begin("up", "w5")
	l.eventually("up waits with a reason", func() bool {
		return strings.Contains(up.output(), "all 4 GPUs") && strings.Contains(up.output(), "queued: place 1 of 1")
	})
	out, code := up.interrupt()
	if code != 130 || !strings.Contains(out, "w5 stays queued") || !strings.Contains(out, "carrel stop w5") {
		t.Errorf("up after SIGINT: exit %d, want 130 and the state that it leaves\n%s", code, out)
	}
	if w := ana.show("w5"); w.State != "queued" || w.Queue.Place != 1 {
		t.Errorf("after SIGINT w5 is %s, place %d; want queued, place 1", w.State, w.Queue.Place)
	}
	ana.ok("stop", "w5")
	w := ana.show("w5")
	if w.State != "stopped" || len(w.Leases) != 0 {
		t.Errorf("after stop w5 is %s with leases %v", w.State, w.Leases)
	}
	ana.ok("stop", "w1")
	if w := ana.show("w5"); w.State != "stopped" {
		t.Errorf("w5 was stopped while it waited, and is %s after another ended", w.State)
	}
}

// TestGPUCounts holds what cannot be had: more than any host has, than a user may, than there is, and what is no number.
func TestGPUCounts(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	ana := l.admin
	for _, c := range []struct {
		gpu  string
		code int
		want []string
	}{
		{"5", 5, []string{"5 GPUs", "the largest possible is 4"}},
		{"1000000", 2, []string{"1000000", "1024"}},
		{"-1", 2, []string{"-1"}},
		{"H100", 2, []string{"no GPU of model H100", "4090 (4)"}},
		{"H100:2", 2, []string{"no GPU of model H100", "4090 (4)"}},
		{"4090:", 2, nil},
		{"4090:x", 2, []string{"4090:x"}},
		{"1.5", 2, []string{"1.5"}},
		{"99999999999999999999", 2, nil},
	} {
		for _, wait := range []string{"-q", "-d"} {
			out, stderr, code := ana.run(nil, "up", "w", "--gpu="+c.gpu, wait)
			if code != c.code || out != "" {
				t.Errorf("up --gpu %s %s: exit %d, want %d\n%s%s", c.gpu, wait, code, c.code, out, stderr)
			}
			for _, text := range c.want {
				if !strings.Contains(stderr, text) {
					t.Errorf("up --gpu %s: %q is not in:\n%s", c.gpu, text, stderr)
				}
			}
		}
	}
	if left := ana.ok("ls", "-q"); left != "" {
		t.Errorf("refused workspaces left behind: %s", left)
	}

	bo := l.addUser("bo", "--gpu-limit", "2")
	l.admin.ok("user", "set", "bo", "--gpu-limit", "1")
	bo.ok("up", "one", "-q")
	bo.fails([]string{"your limit is 1 GPU", "one"}, "up", "two", "-q")
	bo.ok("up", "cpu", "--gpu", "none", "--cpus", "0.1", "--memory", "128M", "-q")
	if got := strings.Fields(bo.ok("ls", "-q")); len(got) != 2 {
		t.Errorf("bo has %v, want one and cpu", got)
	}
	l.admin.ok("user", "set", "bo", "--gpu-limit", "2")
	bo.ok("up", "two", "-q")
}

// fillGPUs starts one-GPU workspaces of a person and waits for them.
func (l *lab) fillGPUs(p *person, names ...string) {
	l.t.Helper()
	for _, name := range names {
		p.ok("up", name, "-d", "-q")
	}
	for _, name := range names {
		p.waitState(name, "running")
	}
}

// lastLease returns the newest lease of a workspace.
func lastLease(t *testing.T, w shown) lease {
	t.Helper()
	if len(w.Leases) == 0 {
		t.Fatalf("%s has no lease", w.ID)
	}
	last := w.Leases[0]
	for _, l := range w.Leases {
		if l.StartedAt.After(last.StartedAt) {
			last = l
		}
	}
	return last
}

// checkNoDoubleLease holds that no device was in two leases at one time.
func checkNoDoubleLease(t *testing.T, p *person, names ...string) {
	t.Helper()
	type held struct {
		lease
		by string
	}
	var all []held
	for _, name := range names {
		for _, l := range p.show(name).Leases {
			all = append(all, held{l, name})
		}
	}
	for i, a := range all {
		for _, b := range all[i+1:] {
			over := func(x, y held) bool { return x.EndedAt.IsZero() || x.EndedAt.After(y.StartedAt) }
			if a.DeviceID == b.DeviceID && over(a, b) && over(b, a) {
				t.Errorf("device %s was in leases of %s [%s, %s) and of %s [%s, %s)", a.DeviceID, a.by, a.StartedAt, a.EndedAt, b.by, b.StartedAt, b.EndedAt)
			}
		}
	}
}

// background is a program that goes on while the test does other things.
type background struct {
	l    *lab
	cmd  *exec.Cmd
	text lockedBuffer
	done chan struct{}
}

// lockedBuffer is a buffer that a program writes while a test reads it.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// begin starts carrel and does not wait for it.
func (p *person) begin(args ...string) *background {
	p.l.t.Helper()
	return p.beginProgram(bin(p.l.t, "carrel"), args...)
}

func (p *person) beginProgram(name string, args ...string) *background {
	p.l.t.Helper()
	b := &background{l: p.l, done: make(chan struct{})}
	b.cmd = exec.Command(name, args...) //nolint:noctx // ends with the test
	b.cmd.Env = p.env()
	b.cmd.Stdout, b.cmd.Stderr = &b.text, &b.text
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // so that all of it can be ended
	if err := b.cmd.Start(); err != nil {
		p.l.t.Fatal(err)
	}
	go func() {
		_ = b.cmd.Wait() // how it ended stands in ProcessState
		close(b.done)
	}()
	p.l.t.Cleanup(func() {
		_ = syscall.Kill(-b.cmd.Process.Pid, syscall.SIGKILL) // it may have ended
		<-b.done
	})
	return b
}

func (b *background) output() string { return b.text.String() }

// wait returns what the program wrote and its exit code once it has ended.
func (b *background) wait(limit time.Duration) (output string, code int) {
	b.l.t.Helper()
	select {
	case <-b.done:
	case <-time.After(limit):
		b.l.t.Fatalf("%s did not end within %s\n%s", strings.Join(b.cmd.Args, " "), limit, b.output())
	}
	return b.output(), b.cmd.ProcessState.ExitCode()
}

// interrupt is Ctrl-C.
func (b *background) interrupt() (output string, code int) {
	b.l.t.Helper()
	if err := b.cmd.Process.Signal(syscall.SIGINT); err != nil {
		b.l.t.Fatal(err)
	}
	return b.wait(commandLimit)
}

// list reads a list that carrel prints as JSON.
func list[T any](p *person, args ...string) []T {
	p.l.t.Helper()
	var items []T
	out := p.ok(append(args, "-o", "json")...)
	if err := json.Unmarshal([]byte(out), &items); err != nil {
		p.l.t.Fatalf("carrel %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return items
}
