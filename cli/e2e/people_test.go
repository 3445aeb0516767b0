package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"testing"
)

// account makes a Unix account of its own for a test and removes it after.
func account(t *testing.T) (name, home string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test makes a Unix account, which takes root")
	}
	name = fmt.Sprintf("ct%d", os.Getpid())
	home = filepath.Join(t.TempDir(), "home")
	if out, err := exec.Command("useradd", "--create-home", "--home-dir", home, "--shell", "/bin/bash", name).CombinedOutput(); err != nil { //nolint:noctx // short
		t.Fatalf("useradd: %v\n%s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("userdel", "--force", name).CombinedOutput(); err != nil { //nolint:noctx // short
			t.Errorf("userdel: %v\n%s", err, out)
		}
	})
	for dir := filepath.Dir(home); dir != "/" && dir != os.TempDir(); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // the account must reach its home
			t.Fatal(err)
		}
	}
	return name, home
}

// TestSecondPersonIsAStrangerToTheFirst has somebody else sign in from another Unix account: they see and reach nothing of the first's,
// files have their own uid, and neither key nor stream of the one opens anything of the other.
func TestSecondPersonIsAStrangerToTheFirst(t *testing.T) {
	l := newLab(t, true)
	ana := l.addUser("ana")
	ana.ok("up", "w1", "--image", testImage)
	ana.sshOK("w1.carrel", "echo ana > secret")

	unix, home := account(t)
	out := l.admin.ok("user", "add", "bo", "-o", "json")
	link, _, _ := strings.Cut(out[strings.Index(out, "http"):], `"`)
	programs := filepath.Join(t.TempDir(), "bin")
	as := func(args ...string) (stdout, stderr string, code int) {
		t.Helper()
		return l.admin.program(nil, "runuser", append([]string{"-u", unix, "--", "env", "-u", "CARREL_CONFIG_DIR", "-u", "CARREL_SSH_CONFIG", "HOME=" + home, "PATH=" + programs + ":/usr/bin:/bin"}, args...)...)
	}
	if err := os.MkdirAll(programs, 0o755); err != nil { //nolint:gosec // the account must reach it
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Dir(programs), 0o755); err != nil { //nolint:gosec // as above
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", bin(t, "carrel"), programs).CombinedOutput(); err != nil { //nolint:noctx // short
		t.Fatalf("cp: %v\n%s", err, out)
	}
	must := func(args ...string) string {
		t.Helper()
		out, errs, code := as(args...)
		if code != 0 {
			t.Fatalf("%s: exit %d\n%s%s", strings.Join(args, " "), code, out, errs)
		}
		return out
	}
	must("carrel", "login", link)
	if got := must("carrel", "ls", "-q"); strings.TrimSpace(got) != "" {
		t.Errorf("bo sees workspaces: %s", got)
	}
	for _, ref := range []string{"w1", "ana/w1", ana.show("w1").ID} {
		for _, verb := range [][]string{{"show"}, {"stop"}, {"logs"}, {"rm", "--yes"}} {
			if out, errs, code := as(append(append([]string{"carrel"}, verb...), ref)...); code == 0 {
				t.Errorf("bo may %s %s:\n%s%s", verb[0], ref, out, errs)
			}
		}
	}
	must("carrel", "up", "w1", "--image", testImage)
	if got := must("ssh", "w1.carrel", "cat secret 2>/dev/null; id -u; touch mine; stat -c %u mine"); strings.Contains(got, "ana") || len(strings.Fields(got)) != 2 || strings.Fields(got)[0] != strings.Fields(got)[1] {
		t.Errorf("in bo's workspace: %q", got)
	}
	if own := ana.sshOK("w1.carrel", "id -u; cat secret"); strings.Fields(own)[0] == strings.Fields(must("ssh", "w1.carrel", "id -u"))[0] {
		t.Error("both have the same uid")
	}

	// The first one's key on the second one's stream.
	keys, err := filepath.Glob(filepath.Join(ana.home, "settings", "deployments", "*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	stolen := filepath.Join(home, "stolen")
	for _, path := range append(keys, "") {
		if content, err := os.ReadFile(path); err == nil && strings.Contains(string(content), "OPENSSH PRIVATE KEY") {
			if err := os.WriteFile(stolen, content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	id, err := user.Lookup(unix)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("chown", id.Uid, stolen).CombinedOutput(); err != nil { //nolint:noctx // short
		t.Fatalf("ana's key was not found under %v: %v %s", keys, err, out)
	}
	if out, errs, code := as("ssh", "-i", stolen, "-o", "IdentityFile="+stolen, "-o", "IdentitiesOnly=yes", "-F", configWithKey(t, as, home, stolen, id.Uid), "w1.carrel", "true"); code != 255 || !strings.Contains(errs, "Permission denied") {
		t.Errorf("ana's key on bo's workspace: exit %d\n%s%s", code, out, errs)
	}

	// A stream that leads to another workspace than the one that was meant.
	must("carrel", "up", "w2", "--gpu", "0", "--image", testImage)
	wrong := must("ssh", "-G", "w2.carrel")
	var proxy string
	for line := range strings.SplitSeq(wrong, "\n") {
		if rest, ok := strings.CutPrefix(line, "proxycommand "); ok {
			proxy = rest
		}
	}
	out, errs, code := as("ssh", "-o", "ProxyCommand="+proxy, "w1.carrel", "true")
	if code != 255 || !strings.Contains(errs, "host key") && !strings.Contains(errs, "Host key") && !strings.Contains(errs, "Certificate") {
		t.Errorf("a stream to w2 for w1: exit %d\n%s%s", code, out, errs)
	}
	for _, name := range []string{"w1", "w2"} {
		must("carrel", "rm", "--yes", name)
	}
}

// configWithKey writes bo's effective ssh configuration of w1.carrel with another key in place of the managed one.
func configWithKey(t *testing.T, as func(...string) (string, string, int), home, key, uid string) string {
	t.Helper()
	effective, errs, code := as("ssh", "-G", "w1.carrel")
	if code != 0 {
		t.Fatalf("ssh -G: %s", errs)
	}
	config := "Host w1.carrel\n"
	for line := range strings.SplitSeq(effective, "\n") {
		name, value, _ := strings.Cut(line, " ")
		switch name {
		case "hostname", "user", "proxycommand", "hostkeyalias", "userknownhostsfile", "globalknownhostsfile", "stricthostkeychecking":
			config += "  " + name + " " + value + "\n"
		}
	}
	config += "  IdentityFile " + key + "\n  IdentitiesOnly yes\n"
	path := filepath.Join(home, "other_config")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("chown", uid, path).CombinedOutput(); err != nil { //nolint:noctx // short
		t.Fatalf("chown: %v %s", err, out)
	}
	return path
}
