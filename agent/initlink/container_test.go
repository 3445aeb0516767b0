package initlink_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestContainerIdentityAndEnvironment(t *testing.T) {
	b := newBox(t, withSudo, func(s *boxSpec) { s.env = []string{"GODEBUG=bogus=1", "GOMAXPROCS=1", "HAND_SET=x y"} })
	if b.found.Sudo != "yes" || b.found.Shell != "/bin/bash" || b.found.InitVersion == "" {
		t.Errorf("found %+v", b.found)
	}
	b.want(b.ssh("id -un; id -u; id -g; id -G; pwd; echo $HOME $SHELL $USER"),
		"ana\n12345\n12346\n12346 20000\n/home/ana\n/home/ana /bin/bash ana\n", 0)
	env := b.ssh("env").stdout
	for _, want := range []string{"IMAGE_MARK=carrel-test\n", "CARREL_WORKSPACE=demo\n", "NVIDIA_VISIBLE_DEVICES=void\n", "HAND_SET=x y\n", "GOMAXPROCS=1\n"} {
		if !strings.Contains(env, want) {
			t.Errorf("%q is not in the environment:\n%s", want, env)
		}
	}
	b.want(b.ssh("sudo id -u"), "0\n", 0)
	b.want(b.ssh("getent passwd ana | cut -d: -f1,3,4,6,7; getent group 12346 20000"),
		"ana:12345:12346:/home/ana:/bin/bash\nana:x:12346:\nlab:x:20000:ana\n", 0)
	b.want(b.ssh("test -f ~/.bashrc && stat -c '%u %g' ~/.bashrc ~"), "12345 12346\n12345 12346\n", 0)
	// carrel-init's own processes have nothing of the image's environment.
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", b.pid))
	b.must(err)
	if strings.Contains(string(environ), "GODEBUG") || strings.Contains(string(environ), "IMAGE_MARK") {
		t.Errorf("process 1 runs with %q", environ)
	}
}

func TestContainerWithoutSudoHasNoWayUp(t *testing.T) {
	b := newBox(t)
	if b.found.Sudo != "no: pool" {
		t.Errorf("found %+v", b.found)
	}
	b.want(b.ssh("grep -E '^(CapBnd|CapPrm|CapEff|CapInh|CapAmb|NoNewPrivs)' /proc/self/status | tr -d '\\t '"),
		"CapInh:0000000000000000\nCapPrm:0000000000000000\nCapEff:0000000000000000\nCapBnd:0000000000000000\n"+
			"CapAmb:0000000000000000\nNoNewPrivs:1\n", 0)
	if got := b.ssh("sudo -n id -u"); got.status == 0 {
		t.Errorf("sudo works: %+v", got)
	}
	b.want(b.ssh("test -e /etc/sudoers.d/carrel; echo $?"), "1\n", 0)
}

func TestHostKeyIsOutOfReachInside(t *testing.T) {
	b := newBox(t, withSudo)
	probe := `for p in $(pgrep -f 'carrel-init (serve|session)'); do ` +
		`for who in "" "sudo"; do $who cat /proc/$p/environ >/dev/null 2>&1 && echo "$who reads environ of $p"; ` +
		`$who ls -l /proc/$p/fd/ 2>/dev/null | grep -q socket && echo "$who sees sockets of $p"; ` +
		`$who head -c 1 /proc/$p/mem >/dev/null 2>/tmp/err; grep -q "Permission denied" /tmp/err || echo "$who opens memory of $p"; done; done; ` +
		`pgrep -fc 'carrel-init (serve|session)'`
	got := b.ssh(probe)
	if strings.TrimSpace(got.stdout) == "0" || strings.Contains(got.stdout, "of ") {
		t.Errorf("%+v", got)
	}
	if got := b.ssh("python3 -c 'import socket; s=socket.socket(socket.AF_UNIX); s.connect(\"/run/carrel-agent/link.sock\")'"); !strings.Contains(got.stderr, "Permission denied") {
		t.Errorf("the user reaches the agent's socket: %+v", got)
	}
}

func TestCONT08OrphansAreReapedAndStatusesKept(t *testing.T) {
	b := newBox(t)
	got := b.ssh(`for i in $(seq 500); do setsid sh -c 'sleep 0.2 &'; done; for i in $(seq 200); do sh -c "exit $((i % 200))"; test $? = $((i % 200)) || echo wrong; done; echo done`)
	b.want(got, "done\n", 0)
	eventually(t, 10*time.Second, "no zombie is left", func() bool {
		return b.ssh("ps -eo stat= | grep -c ^Z").stdout == "0\n"
	})
	for n := range 20 {
		b.want(b.ssh(fmt.Sprintf("exit %d", n)), "", n)
	}
}

func TestPidsLimitOfOrphans(t *testing.T) {
	b := newBox(t, func(s *boxSpec) { s.image = "carrel/busybox:local" })
	b.want(b.ssh("i=0; while [ $i -lt 300 ]; do setsid sh -c 'true &'; i=$((i+1)); done; echo ok"), "ok\n", 0)
	b.want(b.ssh("true"), "", 0)
}

func TestImageWithoutShellOrPasswd(t *testing.T) {
	b := newBox(t, image("carrel/scratch:local"))
	if b.found.Shell != "" {
		t.Errorf("found %+v", b.found)
	}
	b.want(b.ssh("/app 'two words' arg"), "two words arg\n", 0)
	shell := b.ssh()
	if shell.status != 127 || !strings.Contains(shell.stderr, "carrel: this image has no shell; exec and sftp still work\n") {
		t.Errorf("%+v", shell)
	}
	if got := b.ssh("no-such"); got.status != 127 || !strings.Contains(got.stderr, "no-such: not found") {
		t.Errorf("%+v", got)
	}
	local := filepath.Join(b.dir, "f")
	b.must(os.WriteFile(local, []byte("x"), 0o640))
	got := b.run(strings.NewReader("pwd\nput -p "+local+" f\nls -la\nget /etc/passwd "+b.dir+"/passwd\n"), "sftp", "-b", "-", "demo.carrel")
	if got.status != 0 || !strings.Contains(got.stdout, "Remote working directory: /home/ana") || !strings.Contains(got.stdout, "-rw-r-----") {
		t.Errorf("%+v", got)
	}
	passwd, err := os.ReadFile(filepath.Join(b.dir, "passwd"))
	b.must(err)
	if string(passwd) != "ana:x:12345:12346::/home/ana:/bin/sh\n" {
		t.Errorf("passwd %q", passwd)
	}
}

func TestCONT12HomeOfAnotherUserIsRefused(t *testing.T) {
	b := newBox(t, unconfigured, func(s *boxSpec) {
		s.home = func(dir string) {
			if err := os.WriteFile(filepath.Join(dir, "theirs"), nil, 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.Chown(dir, 4321, 4321); err != nil {
				t.Fatal(err)
			}
		}
	})
	_, err := b.current().Configure(b.ctx(20*time.Second), b.key, b.cfg)
	if err == nil || !strings.Contains(err.Error(), "has uid 4321") || !strings.Contains(err.Error(), "chown") {
		t.Errorf("got %v", err)
	}
	b.must(os.Chown(filepath.Join(b.dir, "home"), testUID, testGID))
	if _, err := b.current().Configure(b.ctx(20*time.Second), b.key, b.cfg); err != nil {
		t.Errorf("after the change that the message named: %v", err)
	}
}
