package e2e

import (
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestVolumesOfTwoPeople holds that volumes belong to a person and not to a name, and that nothing takes their files away but a delete that
// names them, which can be undone (CONT-10, CONT-11, CONT-13, CONT-14, CONT-15).
func TestVolumesOfTwoPeople(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	ana, bo, eng := l.admin, l.addUser("bo"), newEngine(t)
	for _, p := range []*person{ana, bo} {
		p.ok("up", "main", "--volume", "data:/data", "-q")
		p.sshOK("main.carrel", "echo "+p.name+" | tee /data/who ~/who >/dev/null")
	}
	for _, p := range []*person{ana, bo} {
		if got := p.sshOK("main.carrel", "cat /data/who ~/who"); got != p.name+"\n"+p.name+"\n" {
			t.Errorf("%s reads %q", p.name, got)
		}
	}

	// One live writer: a second workspace with the same volume waits, and what it does takes nothing from the first.
	ana.ok("up", "other", "--volume", "data:/data", "-d", "-q")
	var waiting shown
	l.eventually("the second says why it waits", func() bool { waiting = ana.show("other"); return waiting.Queue.Why != "" })
	if waiting.State != "queued" || !strings.Contains(waiting.Queue.Why, "volume data") {
		t.Errorf("with the volume in use the second is %s: %q", waiting.State, waiting.Queue.Why)
	}
	ana.ok("rm", "other", "--yes")
	ana.sshOK("main.carrel", "echo more >> /data/who")

	// Deleting is refused while something is mounted, whatever the state on the way.
	ana.fails([]string{"data", "main", "stop"}, "volume", "rm", "data", "--yes")
	ana.fails([]string{"main-home", "main"}, "volume", "rm", "main-home", "--yes")
	bo.fails([]string{"nope"}, "volume", "rm", "nope", "--yes")
	ana.ok("stop", "main", "-q")

	// An engine that cleans up finds nothing of ours, however unused it is.
	ana.sshFails("main.carrel", "true")
	filter := url.QueryEscape(`{"label":["dev.carrel.made=volume"],"all":["true"]}`)
	var pruned struct{ VolumesDeleted []string }
	if status := eng.call(http.MethodPost, "/volumes/prune?filters="+filter, &pruned); status < 300 {
		t.Logf("the engine's clean-up forgot %v", pruned.VolumesDeleted)
	}
	ana.ok("start", "main", "-q")
	if got := ana.sshOK("main.carrel", "cat /data/who ~/who"); got != "admin\nmore\nadmin\n" {
		t.Errorf("after the engine's clean-up the files hold %q", got)
	}
	ana.ok("stop", "main", "-q")

	// Deleted, and taken back.
	out := ana.ok("volume", "rm", "data", "--yes")
	if !strings.Contains(out, "carrel volume restore") {
		t.Errorf("volume rm does not say how to undo it:\n%s", out)
	}
	if names := ana.ok("volume", "ls", "-q"); strings.Contains(names, "data") {
		t.Errorf("the deleted volume is still listed:\n%s", names)
	}
	if names := ana.ok("volume", "ls", "--deleted"); !strings.Contains(names, "data") {
		t.Errorf("the deleted volume is not listed among the deleted:\n%s", names)
	}
	ana.ok("volume", "restore", "data")
	ana.ok("start", "main", "-q")
	if got := ana.sshOK("main.carrel", "cat /data/who"); got != "admin\nmore\n" {
		t.Errorf("after delete and restore the file holds %q", got)
	}
	if got := bo.sshOK("main.carrel", "cat /data/who ~/who"); got != "bo\nbo\n" {
		t.Errorf("in the end bo reads %q", got)
	}
}

// sshFails runs ssh, which must not get in.
func (p *person) sshFails(args ...string) {
	p.l.t.Helper()
	if out, stderr, code := p.ssh(nil, args...); code != 255 || stderr == "" {
		p.l.t.Errorf("ssh %s: exit %d, want 255 and a reason\n%s%s", strings.Join(args, " "), code, out, stderr)
	}
}

// TestHomeOutlivesImages holds what survives another image: the home, and nothing else (CONT-11, CONT-16).
func TestHomeOutlivesImages(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	ana := l.admin
	ana.ok("up", "demo", "-q")
	ana.sshOK("demo.carrel", "echo keep > ~/keep.txt; sudo -n touch /opt/lost; touch /tmp/lost")
	ana.ok("update", "demo", "--image", "carrel/busybox:local")
	if got := ana.sshOK("demo.carrel", "cat keep.txt"); got != "keep\n" {
		t.Errorf("an update reached the running workspace: %q", got)
	}
	if out := ana.ok("show", "demo"); !strings.Contains(out, "at next restart") || !strings.Contains(out, "image") {
		t.Errorf("show does not tell what is pending:\n%s", out)
	}
	ana.ok("restart", "demo", "-q")
	if got := ana.sshOK("demo.carrel", "cat keep.txt; ls /opt/lost /tmp/lost 2>/dev/null; true"); got != "keep\n" {
		t.Errorf("with another image the files are %q, want keep.txt and no more", got)
	}
	if got := ana.sshOK("demo.carrel", "ls /bin/busybox"); got != "/bin/busybox\n" {
		t.Errorf("it does not run the other image: %q", got)
	}

	// An image that nobody has is refused before anything is touched.
	ana.ok("stop", "demo", "-q")
	out, stderr, code := ana.run(nil, "update", "demo", "--image", "carrel/nosuch:local")
	if code == 0 || !strings.Contains(stderr, "carrel/nosuch:local") {
		t.Errorf("update to an image that nobody has: exit %d\n%s%s", code, out, stderr)
	}
	home := l.homeFile(ana.show("demo"), "keep.txt")
	if got := readFile(home); got != "keep" {
		t.Errorf("on the host the file holds %q", got)
	}
	ana.ok("update", "demo", "--image", testImage)
	ana.ok("start", "demo", "-q")
	if got := ana.sshOK("demo.carrel", "cat keep.txt"); got != "keep\n" {
		t.Errorf("after it all the file holds %q", got)
	}
}

// TestSudoByPool holds that root inside is had where the pool allows it, and that where not, sudo says why (D6).
func TestSudoByPool(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	ana := l.admin
	ana.ok("up", "demo", "-q")
	if got := ana.sshOK("demo.carrel", "sudo -n id -u"); got != "0\n" {
		t.Errorf("sudo gives uid %q", got)
	}
	const makePackage = `set -e; mkdir -p p/DEBIAN p/usr/bin; printf '#!/bin/sh\necho tool\n' > p/usr/bin/carrel-tool; chmod 755 p/usr/bin/carrel-tool
printf 'Package: carrel-tool\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: a tool\n' > p/DEBIAN/control
dpkg-deb --root-owner-group -b p tool.deb >/dev/null; cp tool.deb /tmp; sudo -n apt-get install -y /tmp/tool.deb >install.log 2>&1 || { cat install.log >&2; exit 1; }; carrel-tool`
	if got := ana.sshOK("demo.carrel", makePackage); got != "tool\n" {
		t.Errorf("what apt-get installed says %q", got)
	}
	ana.ok("pool", "set", "default", "--sudo=false")
	if got := ana.sshOK("demo.carrel", "sudo -n id -u"); got != "0\n" {
		t.Errorf("the pool's change reached a run that goes on: %q", got)
	}
	ana.ok("restart", "demo", "-q")
	out, stderr, code := ana.ssh(nil, "demo.carrel", "sudo -n true")
	if code == 0 || strings.TrimSpace(out+stderr) == "" {
		t.Errorf("sudo without the pool's leave: exit %d\n%s%s", code, out, stderr)
	}
	t.Logf("sudo without leave says: %s", strings.TrimSpace(out+stderr))
	if got := ana.sshOK("demo.carrel", "grep -h NoNewPrivs /proc/self/status; grep -h CapBnd /proc/self/status"); !strings.Contains(got, "NoNewPrivs:\t1") || !strings.Contains(got, "0000000000000000") {
		t.Errorf("without sudo a session has\n%s", got)
	}
	if out := ana.ok("show", "demo"); !strings.Contains(out, "sudo") {
		t.Errorf("show does not tell about sudo:\n%s", out)
	}
}

// TestDeclaredMounts holds that of the host a workspace gets what an admin declared and the host's owner allows, as it was declared, and
// that a start which fails for it keeps the home.
func TestDeclaredMounts(t *testing.T) {
	t.Parallel()
	shared := t.TempDir()
	for _, dir := range []string{shared, filepath.Dir(shared)} {
		if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // people inside read it
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(shared, "set.txt"), []byte("shared\n"), 0o644); err != nil { //nolint:gosec // the same
		t.Fatal(err)
	}
	settings := filepath.Join(t.TempDir(), "gateway.yaml")
	text := "mounts:\n  - name: datasets\n    path: " + shared + "\n    read_only: true\n    public: true\n" +
		"  - name: secret\n    path: " + t.TempDir() + "\n    read_only: true\n    public: true\n" +
		"  - name: etc\n    path: /etc\n    read_only: true\n    public: true\n"
	if err := os.WriteFile(settings, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(policy, []byte("mounts:\n  - path: "+shared+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l := newLab(t, true, "--config", settings, "--policy-file", policy)
	ana := l.admin
	ana.ok("up", "demo", "--volume", "datasets:/datasets:ro", "-q")
	if got := ana.sshOK("demo.carrel", "cat /datasets/set.txt"); got != "shared\n" {
		t.Errorf("the mount holds %q", got)
	}
	for _, sudo := range []string{"", "sudo -n "} {
		if out, stderr, code := ana.ssh(nil, "demo.carrel", sudo+"touch /datasets/mine"); code == 0 || !strings.Contains(stderr, "Read-only") {
			t.Errorf("writing to it with %q: exit %d\n%s%s", sudo, code, out, stderr)
		}
	}

	// The gateway declares it, the host's own policy file does not allow it.
	ana.sshOK("demo.carrel", "echo keep > keep.txt")
	ana.ok("update", "demo", "--volume", "secret:/secret:ro")
	ana.fails([]string{"demo is failed", "host policy file"}, "restart", "demo")
	w := ana.show("demo")
	if last := lastLease(t, w); w.State != "failed" || last.EndedAt.IsZero() || last.ReleasedAt.IsZero() || newEngine(t).exists(containerName(w)) {
		t.Errorf("after a start that failed it is %s with %+v; want failed, nothing held and no container", w.State, last)
	}
	ana.ok("update", "demo", "--unset-volume", "secret")
	ana.fails([]string{"is failed", "the host's own"}, "up", "w", "--volume", "etc:/host:ro")
	ana.ok("rm", "w", "--yes")
	ana.ok("start", "demo", "-q")
	if got := ana.sshOK("demo.carrel", "cat keep.txt; ls /secret 2>/dev/null; true"); got != "keep\n" {
		t.Errorf("after a start that failed the home holds %q", got)
	}
	ana.fails([]string{"/etc"}, "up", "w", "--volume", "/etc:/host", "-q")
	ana.fails([]string{"data", "/etc"}, "up", "w", "--volume", "data:/etc", "-q")
	ana.fails([]string{"/home"}, "up", "w", "--volume", "data:/home", "-q")
	ana.fails(nil, "up", "w", "--volume", "data:../x", "-q")
	ana.fails(nil, "up", "w", "--volume", "data:/data", "--volume", "data:/more", "-q")
	if names := ana.ok("ls", "-q"); strings.TrimSpace(names) != "demo" {
		t.Errorf("refused ones left %q", names)
	}
}

// TestReservedEnvironment holds that nobody gets at devices by the environment (GPU-09).
func TestReservedEnvironment(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	ana := l.admin
	for _, name := range []string{"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "CUDA_VISIBLE_DEVICES", "CARREL_DEVICES", "LD_PRELOAD", "HOME"} {
		ana.fails([]string{name, "set by Carrel"}, "up", "w", "-e", name+"=all", "-q")
	}
	ana.fails([]string{"BAD-NAME"}, "up", "w", "-e", "BAD-NAME=1", "-q")
	ana.fails(nil, "up", "w", "-e", "=1", "-q")
	if names := ana.ok("ls", "-q"); names != "" {
		t.Errorf("refused ones left %q", names)
	}
	ana.ok("up", "w", "--gpu", "none", "--cpus", "0.2", "--memory", "256M", "-e", "MINE=a b=c\"$x'", "-q")
	if got := ana.sshOK("w.carrel", "printenv MINE NVIDIA_VISIBLE_DEVICES CARREL_GPU_COUNT"); got != "a b=c\"$x'\nvoid\n0\n" {
		t.Errorf("inside there is %q", got)
	}
	// An update is held to the same.
	ana.fails([]string{"CUDA_VISIBLE_DEVICES"}, "update", "w", "-e", "CUDA_VISIBLE_DEVICES=0")
	l.kill("dev", syscall.SIGTERM)
	ana.fails([]string{"not reached"}, "ls")
	l.start("dev", "dev", "--state", l.state, "--listen", l.listen(), "--gpus", "simulated:4x4090")
	l.waitReady()
}
