package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestMainJourney is the main job from `up` to the bill: ssh with stdin, exit status and environment, stop and start with the files and the
// host key kept, rm that keeps the home, and a bill that equals the leases.
func TestMainJourney(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	ana := l.admin
	before := time.Now()
	out, stderr, code := ana.run(nil, "up", "demo", "--image", testImage)
	if code != 0 || !strings.Contains(out+stderr, "demo.carrel") {
		t.Fatalf("up: exit %d\n%s%s", code, out, stderr)
	}

	out, stderr, code = ana.ssh(strings.NewReader("hello\n"), "demo.carrel", "cat > f; sha256sum f; exit 7")
	if code != 7 || !strings.HasPrefix(out, "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03") {
		t.Errorf("ssh with stdin: exit %d\n%s%s", code, out, stderr)
	}
	env := ana.sshOK("demo.carrel", "env")
	w := ana.show("demo")
	for _, want := range []string{"IMAGE_MARK=carrel-test", "CARREL_WORKSPACE=demo", "CARREL_DEVICES=" + w.Devices[0].ID, "CARREL_GPU_COUNT=1", "NVIDIA_VISIBLE_DEVICES=void"} {
		if !strings.Contains(env, want+"\n") {
			t.Errorf("env has no %s:\n%s", want, env)
		}
	}

	// `up` on a name that exists is the same workspace.
	ana.ok("up", "demo")
	if again := ana.show("demo"); again.ID != w.ID || again.Run.Epoch != 1 {
		t.Errorf("up again made %s epoch %d, want %s epoch 1", again.ID, again.Run.Epoch, w.ID)
	}

	ana.ok("stop", "demo")
	ana.waitState("demo", "stopped")
	ana.ok("start", "demo")
	if got := ana.sshOK("-o", "StrictHostKeyChecking=yes", "demo.carrel", "cat f"); got != "hello\n" {
		t.Errorf("after stop and start the file holds %q", got)
	}

	out, stderr, _ = ana.run(nil, "rm", "--yes", "demo")
	if !strings.Contains(out+stderr, "demo-home") {
		t.Errorf("rm does not say that the home is kept:\n%s%s", out, stderr)
	}
	l.eventually("demo is gone", func() bool { return !strings.Contains(ana.ok("ls", "-q"), "demo") })
	out, stderr, code = ana.run(nil, "up", "demo", "--image", testImage)
	if code != 0 || !strings.Contains(out+stderr, "demo-home") {
		t.Errorf("up does not say that it takes the kept home again: exit %d\n%s%s", code, out, stderr)
	}
	if got := ana.sshOK("demo.carrel", "cat f"); got != "hello\n" {
		t.Errorf("after rm and up the file holds %q", got)
	}
	ana.ok("stop", "demo")
	ana.waitState("demo", "stopped")
	checkBill(t, ana, "demo", before, time.Now())
}

// checkBill compares the report of one workspace with its leases, to the millisecond, and its leases with the client's own clock.
func checkBill(t *testing.T, p *person, name string, notBefore, notAfter time.Time) {
	t.Helper()
	w := p.show(name)
	var want time.Duration
	for _, lease := range w.Leases {
		if lease.StartedAt.Before(notBefore.Truncate(time.Millisecond)) || lease.EndedAt.After(notAfter) || !lease.EndedAt.After(lease.StartedAt) {
			t.Errorf("lease %s is [%s, %s), outside of [%s, %s]", lease.ID, lease.StartedAt, lease.EndedAt, notBefore, notAfter)
		}
		want += lease.EndedAt.Sub(lease.StartedAt)
	}
	out := p.ok("usage", "--by", "workspace", "--workspace", name, "-o", "json")
	if !strings.Contains(out, fmt.Sprintf(`"gpu_ms": %d`, want.Milliseconds())) && want > 0 {
		t.Errorf("leases of %s sum to %d ms; the report says\n%s", name, want.Milliseconds(), out)
	}
}
