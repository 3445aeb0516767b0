package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// adopted is how long a restarted program may need until its workspaces show as running again. On an idle machine it is less than 5 s.
const adopted = 30 * time.Second

// count writes a counter to a file for ever, as a training run that outlives its ssh connection would.
const count = `setsid nohup sh -c 'i=0; while :; do i=$((i+1)); echo $i > ~/counter.new; mv ~/counter.new ~/counter; sleep 0.1; done' >/dev/null 2>&1 </dev/null &`

// TestCrashesLeaveWorkspacesRunning holds that what runs inside goes on while gateway, agent or both are killed or do not answer, that it
// is adopted when they come back, and that all of it is one lease with one unbroken interval (REL-01, REL-07).
func TestCrashesLeaveWorkspacesRunning(t *testing.T) {
	t.Parallel()
	l := newLab(t, false, "--link-ping", "1s", "--link-ping-timeout", "2s")
	ana, eng := l.admin, newEngine(t)
	begun := time.Now()
	ana.ok("up", "w1", "-q")
	ana.sshOK("w1.carrel", count)
	w := ana.show("w1")
	first := eng.inspect(containerName(w))
	file := l.homeFile(w, "counter")
	counted := func() int {
		n, _ := strconv.Atoi(readFile(file))
		return n
	}
	l.eventually("the counter counts", func() bool { return counted() > 0 })
	goesOn := func(when string) {
		t.Helper()
		from := counted()
		l.eventually("the counter goes on "+when, func() bool { return counted() > from+3 })
	}
	back := func(what string) {
		t.Helper()
		started := time.Now()
		l.within(adopted, "w1 runs again after "+what, func() bool {
			out, _, code := ana.run(nil, "show", "w1", "-o", "json")
			var now shown
			return code == 0 && json.Unmarshal([]byte(out), &now) == nil && now.State == "running" && now.UnreachableSince.IsZero()
		})
		t.Logf("%s: adopted after %v", what, time.Since(started).Round(time.Millisecond))
		now, c := ana.show("w1"), eng.inspect(containerName(w))
		if c.ID != first.ID || !c.State.StartedAt.Equal(first.State.StartedAt) || now.Run.Epoch != w.Run.Epoch || !now.Run.StartedAt.Equal(w.Run.StartedAt) {
			t.Errorf("after %s it is epoch %d since %s (container %s), before: %d since %s (container %s)",
				what, now.Run.Epoch, now.Run.StartedAt, c.ID, w.Run.Epoch, w.Run.StartedAt, first.ID)
		}
		if len(now.Leases) != 1 || now.Leases[0].ID != w.Leases[0].ID || !now.Leases[0].StartedAt.Equal(w.Leases[0].StartedAt) || !now.Leases[0].EndedAt.IsZero() {
			t.Errorf("after %s the leases are %+v, before: %+v", what, now.Leases, w.Leases)
		}
		goesOn("after " + what)
		if got := ana.sshOK("w1.carrel", "echo in"); got != "in\n" {
			t.Errorf("ssh after %s: %q", what, got)
		}
	}
	// away checks what is told of a workspace whose host does not answer.
	away := func(how string) {
		t.Helper()
		l.eventually("the host is shown as unreachable", func() bool { return !ana.show("w1").UnreachableSince.IsZero() })
		now := ana.show("w1")
		if now.State != "running" || len(now.Leases) != 1 || !now.Leases[0].EndedAt.IsZero() {
			t.Errorf("with the agent %s w1 is %s with leases %+v; want running, with an open one", how, now.State, now.Leases)
		}
		for _, verb := range []string{"show", "ls"} {
			args := map[string][]string{"show": {"show", "w1"}, "ls": {"ls"}}[verb]
			if out := ana.ok(args...); !strings.Contains(out, "host does not answer since") {
				t.Errorf("with the agent %s, %s does not tell it:\n%s", how, verb, out)
			}
		}
		if hosts := ana.ok("host", "ls"); !strings.Contains(hosts, "unreachable") {
			t.Errorf("with the agent %s, host ls does not tell it:\n%s", how, hosts)
		}
		goesOn("with the agent " + how)
		asked := time.Now()
		out, stderr, code := ana.ssh(nil, "w1.carrel", "true")
		if code != 255 || !strings.Contains(stderr, "does not answer") && !strings.Contains(stderr, "not connected") {
			t.Errorf("ssh with the agent %s: exit %d after %v\n%s%s", how, code, time.Since(asked), out, stderr)
		}
	}

	l.kill("gateway", syscall.SIGKILL)
	goesOn("without a gateway")
	l.startGateway(l.listen(), "--link-ping", "1s", "--link-ping-timeout", "2s")
	back("kill -9 of the gateway")

	l.kill("agent", syscall.SIGKILL)
	away("killed")
	l.startAgent("")
	back("kill -9 of the agent")

	l.kill("gateway", syscall.SIGKILL)
	l.kill("agent", syscall.SIGKILL)
	goesOn("without both")
	l.startAgent("") // the one that needs the other comes first
	l.startGateway(l.listen(), "--link-ping", "1s", "--link-ping-timeout", "2s")
	back("kill -9 of both")

	if err := l.procs["agent"].cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	away("stopped")
	if err := l.procs["agent"].cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	back("SIGSTOP of the agent")

	ana.ok("stop", "w1", "-q")
	checkBill(t, ana, "w1", begun, time.Now())
	checkLedger(t, ana)
	if w := ana.show("w1"); len(w.Leases) != 1 {
		t.Errorf("in the end there are leases %+v, want one", w.Leases)
	}
}

// checkLedger holds that the ledger says what the leases say.
func checkLedger(t *testing.T, admin *person) {
	t.Helper()
	out, stderr, code := admin.run(nil, "usage", "check")
	if fields := strings.Fields(out); code != 0 || len(fields) != 4 || fields[2] != "differences" || fields[3] != "0" {
		t.Errorf("usage check: exit %d\n%s%s", code, out, stderr)
	}
}

// TestEndsFromOutside holds that a container that is removed or killed behind Carrel's back ends its lease, when all programs run, when
// the agent is away and when the gateway is (REL-02, REL-05, ACCT-05, ACCT-12). Where the engine knows when it ended, the lease ends then.
func TestEndsFromOutside(t *testing.T) {
	t.Parallel()
	l := newLab(t, false)
	ana, eng := l.admin, newEngine(t)
	begun := time.Now()
	names := []string{"w1", "w2", "w3", "w4"}
	l.fillGPUs(ana, names...)
	held := map[string]shown{}
	for _, name := range names {
		held[name] = ana.show(name)
	}
	remove := func(name string) {
		t.Helper()
		eng.must(http.MethodDelete, "/containers/"+containerName(held[name])+"?force=1", nil)
	}
	kill := func(name string) (finished time.Time) {
		t.Helper()
		eng.must(http.MethodPost, "/containers/"+containerName(held[name])+"/kill", nil)
		l.eventually("the engine says when it ended", func() bool {
			finished = eng.inspect(containerName(held[name])).State.FinishedAt
			return finished.After(begun)
		})
		return finished
	}
	ended := func(name, code string) lease {
		t.Helper()
		w := ana.waitState(name, "stopped")
		last := lastLease(t, w)
		if w.Reason.Code != code || w.Reason.Message == "" || last.EndedAt.IsZero() || last.ReleasedAt.IsZero() {
			t.Errorf("%s: reason %+v, lease %+v; want %s and an end", name, w.Reason, last, code)
		}
		return last
	}
	at := func(name string, end, want time.Time) {
		t.Helper()
		if end.Sub(want).Abs() > time.Second {
			t.Errorf("the lease of %s ended at %s, its container at %s", name, end, want)
		}
		t.Logf("%s: lease ended %v after what the engine says", name, end.Sub(want))
	}

	// With all programs there.
	removedAt := time.Now()
	remove("w1")
	last := ended("w1", "removed_outside")
	t.Logf("w1: removal noticed %v after it", last.ReleasedAt.Sub(removedAt).Round(time.Millisecond))
	ana.ok("start", "w1", "-q")
	held["w1"] = ana.show("w1")
	finished := kill("w2")
	at("w2", ended("w2", "killed_outside").EndedAt, finished)
	ana.ok("rm", "w2", "--yes")

	// With the agent away.
	heard := time.Now()
	l.kill("agent", syscall.SIGKILL)
	gone := time.Now()
	remove("w1")
	finished = kill("w3")
	l.eventually("the host is unreachable", func() bool { return !ana.show("w1").UnreachableSince.IsZero() })
	for _, name := range []string{"w1", "w3", "w4"} {
		if w := ana.show(name); w.State != "running" || !lastLease(t, w).EndedAt.IsZero() {
			t.Errorf("while the agent is away %s is %s with %+v; nothing was observed", name, w.State, lastLease(t, w))
		}
	}
	l.startAgent("")
	at("w3", ended("w3", "killed_outside").EndedAt, finished)
	if end := ended("w1", "removed_outside").EndedAt; end.Before(heard.Add(-5*time.Second)) || end.After(gone) {
		t.Errorf("w1 was removed while nobody looked; its lease ended at %s, not when the agent last saw it, up to %s", end, gone)
	}

	// With the gateway away.
	l.kill("gateway", syscall.SIGKILL)
	finished = kill("w4")
	l.startGateway(l.listen())
	l.waitReady()
	at("w4", ended("w4", "killed_outside").EndedAt, finished)

	// All come back when asked, on a paused engine container too nothing is lost.
	ana.ok("start", "w1", "-q")
	w := ana.show("w1")
	eng.must(http.MethodPost, "/containers/"+containerName(w)+"/pause", nil)
	if now := ana.show("w1"); now.State != "running" || !lastLease(t, now).EndedAt.IsZero() {
		t.Errorf("paused from outside it is %s with %+v; it still holds its GPU", now.State, lastLease(t, now))
	}
	eng.must(http.MethodPost, "/containers/"+containerName(w)+"/unpause", nil)
	if got := ana.sshOK("w1.carrel", "echo in"); got != "in\n" {
		t.Errorf("ssh after the pause: %q", got)
	}
	ana.ok("stop", "w1", "-q")
	for _, name := range []string{"w1", "w3", "w4"} {
		checkBill(t, ana, name, begun, time.Now())
	}
	checkNoDoubleLease(t, ana, "w1", "w3", "w4")
	checkLedger(t, ana)
}

// TestOldDatabaseRemovesNothing holds that a database put back from an older copy ends no workspace: what it does not know is left alone,
// shown, and its devices are not given out (D3).
func TestOldDatabaseRemovesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t, false)
	ana, eng := l.admin, newEngine(t)
	ana.ok("up", "w1", "-q")
	l.kill("gateway", syscall.SIGTERM)
	saved := map[string][]byte{}
	files, err := filepath.Glob(filepath.Join(l.state, "carrel.db*"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, path := range files {
		if saved[path], err = os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
	}
	l.startGateway(l.listen())
	l.waitReady()
	ana.ok("up", "w2", "-q")
	ana.ok("up", "w3", "-q")
	w1, w2, w3 := ana.show("w1"), ana.show("w2"), ana.show("w3")
	t.Cleanup(func() { // the lab does not know them any more
		for _, w := range []shown{w2, w3} {
			eng.call(http.MethodDelete, "/containers/"+containerName(w)+"?force=1", nil)
		}
	})

	l.kill("gateway", syscall.SIGKILL)
	after, _ := filepath.Glob(filepath.Join(l.state, "carrel.db*"))
	for _, path := range after {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	for path, content := range saved {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l.startGateway(l.listen())
	l.waitReady()
	l.eventually("the host is ready", func() bool { return strings.Contains(ana.ok("host", "ls", "-o", "json"), `"ready"`) })
	names := strings.Fields(ana.ok("ls", "-q"))
	if fmt.Sprint(names) != "[w1]" {
		t.Errorf("the old database has %v, want w1", names)
	}
	if now := ana.show("w1"); now.State != "running" || now.Run.Epoch != w1.Run.Epoch || len(now.Leases) != 1 {
		t.Errorf("w1 is %s, epoch %d, leases %+v", now.State, now.Run.Epoch, now.Leases)
	}

	// The host refuses orders that are older than what it has seen, until an admin says that this is the database to follow.
	l.kill("gateway", syscall.SIGTERM)
	l.start("recover", "recover", "--state", l.state)
	select {
	case <-l.procs["recover"].done:
	case <-time.After(commandLimit):
		t.Fatal("recover did not end")
	}
	if p := l.procs["recover"]; p.cmd.ProcessState.ExitCode() != 0 {
		t.Fatalf("recover: exit %d\n%s", p.cmd.ProcessState.ExitCode(), readFile(p.log))
	}
	delete(l.procs, "recover")
	l.startGateway(l.listen())
	l.waitReady()

	l.eventually("the containers that it does not know are shown", func() bool {
		out := ana.ok("host", "ls", "-o", "json")
		return strings.Contains(out, containerName(w2)) && strings.Contains(out, containerName(w3))
	})

	// One of the four devices is w1's, two are those of the unknown.
	ana.ok("up", "w4", "-q")
	ana.ok("up", "w5", "-d", "-q")
	w4 := ana.show("w4")
	for _, other := range []shown{w1, w2, w3} {
		if w4.Devices[0].ID == other.Devices[0].ID {
			t.Errorf("w4 got device %s, which %s holds", w4.Devices[0].ID, containerName(other))
		}
	}
	l.eventually("w5 says why it waits", func() bool { return ana.show("w5").Queue.Why != "" })
	t.Logf("w5 waits: %s", ana.show("w5").Queue.Why)
	for _, w := range []shown{w1, w2, w3} {
		if !eng.inspect(containerName(w)).State.Running {
			t.Errorf("%s does not run any more", containerName(w))
		}
	}
	checkLedger(t, ana)

	// An admin who removes one gets its device back.
	eng.must(http.MethodDelete, "/containers/"+containerName(w2)+"?force=1", nil)
	if w := ana.waitState("w5", "running"); w.Devices[0].ID != w2.Devices[0].ID {
		t.Errorf("w5 got %s, not %s, which became free", w.Devices[0].ID, w2.Devices[0].ID)
	}
	ana.ok("stop", "w5", "-q")
}
