package session

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

func TestSSH01ExitStatus(t *testing.T) {
	r := newRig(t)
	for n, want := range map[int]int{0: 0, 1: 1, 2: 2, 77: 77, 255: 255, 256: 0} {
		r.want(r.ssh(fmt.Sprintf("exit %d", n)), "", want)
	}
	if got := r.ssh("no-such-cmd"); got.status != 127 {
		t.Errorf("missing command: status %d", got.status)
	}
	if got := r.ssh("-tt", "exit 77"); got.status != 77 {
		t.Errorf("on a terminal: status %d, stderr %q", got.status, got.stderr)
	}
}

func TestSSH02Signals(t *testing.T) {
	r := newRig(t)
	for cmd, want := range map[string]int{
		"kill -TERM $$": 255, "kill -KILL $$": 255, `bash -c "kill -KILL \$\$"; exit $?`: 137,
	} {
		if got := r.ssh(cmd); got.status != want {
			t.Errorf("%s: status %d, want %d", cmd, got.status, want)
		}
	}
	session, err := r.client().NewSession()
	r.must(err)
	var exit *ssh.ExitError
	if err := session.Run("kill -TERM $$"); !errors.As(err, &exit) || exit.Signal() != "TERM" {
		t.Errorf("Go client: %v", err)
	}
}

func TestSignalRequestReachesTheCommand(t *testing.T) {
	r := newRig(t)
	session, err := r.client().NewSession()
	r.must(err)
	out, err := session.StdoutPipe()
	r.must(err)
	r.must(session.Start(`trap "exit 9" USR1; echo up; while :; do sleep 0.05; done`))
	buf := make([]byte, 3)
	if _, err := out.Read(buf); err != nil || string(buf) != "up\n" {
		t.Fatalf("%q %v", buf, err)
	}
	r.must(session.Signal(ssh.SIGUSR1))
	var exit *ssh.ExitError
	if err := session.Wait(); !errors.As(err, &exit) || exit.ExitStatus() != 9 {
		t.Errorf("got %v", err)
	}
}

func TestSSH05OutputIsDrained(t *testing.T) {
	r := newRig(t)
	for range 10 {
		got := r.ssh("-tt", "seq 1 200000; exit 3")
		if lines := strings.Fields(got.stdout); got.status != 3 || len(lines) != 200000 || lines[199999] != "200000" {
			t.Fatalf("terminal: status %d, %d lines", got.status, len(lines))
		}
	}
	client := r.client()
	for range 300 {
		session, err := client.NewSession()
		r.must(err)
		var errs bytes.Buffer
		session.Stderr = &errs
		var exit *ssh.ExitError
		if err := session.Run("echo oops >&2; exit 4"); !errors.As(err, &exit) || exit.ExitStatus() != 4 || errs.String() != "oops\n" {
			t.Fatalf("%v %q", err, errs.String())
		}
	}
	if got := r.ssh("echo oops >&2; exit 4"); got.stderr != "oops\n" || got.status != 4 {
		t.Errorf("ssh: %+v", got)
	}
	got := r.ssh(`head -c 10000000 /dev/zero | tr "\0" x; exit 7`)
	if len(got.stdout) != 10000000 || got.status != 7 {
		t.Errorf("%d bytes, status %d", len(got.stdout), got.status)
	}
}

func TestSSH07BackgroundJobs(t *testing.T) {
	r := newRig(t)
	got := r.ssh("sleep 8 >/dev/null 2>&1 </dev/null & echo started")
	r.want(got, "started\n", 0)
	if got.took > time.Second {
		t.Errorf("(a) took %v", got.took)
	}
	got = r.ssh("-tt", "sleep 8 & echo started; exit 3")
	r.want(got, "started\r\n", 3)
	if got.took > time.Second {
		t.Errorf("(b) took %v", got.took)
	}
	got = r.ssh("sleep 2 & echo started")
	r.want(got, "started\n", 0)
	if got.took > 4*time.Second {
		t.Errorf("(c) took %v", got.took)
	}
	got = r.ssh("nohup sleep 600 >/dev/null 2>&1 </dev/null & echo $!")
	pid := strings.TrimSpace(got.stdout)
	if alive := r.ssh("kill -0 " + pid + " && kill " + pid); alive.status != 0 {
		t.Errorf("(d) the job is gone: %+v", alive)
	}
}

func TestSSH10OneWorkingDirectory(t *testing.T) {
	r := newRig(t)
	r.want(r.ssh("pwd"), r.home+"\n", 0)
	local := filepath.Join(r.dir, "f")
	r.must(os.WriteFile(local, []byte("x"), 0o644))
	for _, tool := range []string{"scp", "rsync"} {
		if got := r.run(nil, tool, local, "w1:."); got.status != 0 {
			t.Fatalf("%s: %+v", tool, got)
		}
		r.want(r.ssh("ls f && rm f"), "f\n", 0)
	}
	if got := r.run(strings.NewReader("put "+local+" g\n"), "sftp", "-b", "-", "w1"); got.status != 0 {
		t.Fatalf("sftp: %+v", got)
	}
	r.want(r.ssh("ls g"), "g\n", 0)
}

func TestSSH20ScriptOnStandardInput(t *testing.T) {
	r := newRig(t)
	r.must(os.WriteFile(filepath.Join(r.home, ".bashrc"), []byte("echo hello from bashrc\n"), 0o644))
	script := strings.Repeat("X=$((X+1))\n", 20000) + "echo total=$X; exit 9\n"
	for _, shell := range []string{"/bin/bash", "/bin/sh", "/bin/dash"} {
		r.setShell(shell)
		got := r.run(strings.NewReader(script), "ssh", "-T", "-D", freePort(t), "w1", "bash")
		if !strings.HasSuffix(got.stdout, "total=20000\n") || got.status != 9 {
			t.Errorf("%s: %.100q, stderr %q, status %d", shell, got.stdout, got.stderr, got.status)
		}
	}
}

func TestSSH28Environment(t *testing.T) {
	r := newRig(t)
	r.env = []string{"LANG=C.UTF-8", "LC_TIME=C.UTF-8", "LD_PRELOAD=", "CARREL_WORKSPACE=other", "MY_VAR=mine"}
	r.want(r.ssh("echo $SHELL $LOGNAME $USER $HOME $IMAGE_VAR"), "/bin/bash dev dev "+r.home+" from image\n", 0)
	got := r.run(nil, "ssh", "-o", "SendEnv=LANG LC_* LD_PRELOAD CARREL_* MY_VAR", "w1", "locale charmap; env")
	for want, in := range map[string]bool{
		"UTF-8\n": true, "LANG=C.UTF-8\n": true, "LC_TIME=C.UTF-8\n": true, "MY_VAR=mine\n": true, "CARREL_WORKSPACE=w1\n": true,
		"LD_PRELOAD": false, "CARREL_WORKSPACE=other": false, proxyEnv: false,
	} {
		if strings.Contains(got.stdout, want) != in {
			t.Errorf("%q in the output: want %v; %s", want, in, got.stdout)
		}
	}
	r.setShell("/bin/sh")
	r.want(r.ssh("echo $0 $SHELL"), "sh /bin/sh\n", 0)
	login := r.run(strings.NewReader("echo $0\n"), "ssh", "-T", "w1")
	r.want(login, "-sh\n", 0)
}

func TestSSH31HangUp(t *testing.T) {
	r := newRig(t)
	pidFile := filepath.Join(r.home, "pids")
	control := r.ssh("setsid nohup sleep 9998 >/dev/null 2>&1 </dev/null & echo $!")
	for range 5 {
		r.must(os.RemoveAll(pidFile))
		cmd := r.command(t.Context(), "ssh", "w1", `bash -c "echo \$\$ >> pids; sleep 9999 & echo \$! >> pids; touch ready; exec sleep 9999"`)
		r.must(cmd.Start())
		ready := filepath.Join(r.home, "ready")
		eventually(t, 10*time.Second, "command runs", func() bool { _, err := os.Stat(ready); return err == nil })
		r.must(os.Remove(ready))
		r.must(cmd.Process.Kill())
		_ = cmd.Wait()
		pids, err := os.ReadFile(pidFile)
		r.must(err)
		for _, pid := range strings.Fields(string(pids)) {
			eventually(t, 10*time.Second, pid+" is gone", func() bool { return !alive(pid) })
		}
	}
	var pid int
	if _, err := fmt.Sscan(control.stdout, &pid); err != nil {
		t.Fatal(err)
	}
	// setsid may have forked: the job is found by its arguments.
	if got := r.ssh(`pgrep -f "^sleep 9998$"`); got.status != 0 {
		t.Errorf("the control job is gone: %+v", got)
	}
	r.ssh(`pkill -f "^sleep 9998$"`)
}

// alive tells whether a process is there and no zombie.
func alive(pid string) bool {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return false
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(after, "Z")
}

func TestSSH32EndOfFile(t *testing.T) {
	r := newRig(t)
	r.want(r.run(strings.NewReader("hi"), "ssh", "w1", "sleep 1; cat; echo end; exit 5"), "hiend\n", 5)
	r.want(r.run(nil, "ssh", "-n", "w1", "cat | wc -c"), "0\n", 0)
	data := make([]byte, 8<<20)
	if _, err := rand.Read(data); err != nil {
		t.Fatal(err)
	}
	got := r.run(bytes.NewReader(data), "ssh", "w1", "sha256sum")
	r.want(got, fmt.Sprintf("%x  -\n", sha256.Sum256(data)), 0)
}

func TestClientThatStopsReadingEndsTheWriter(t *testing.T) {
	r := newRig(t)
	got := r.run(nil, "ssh", "w1", "yes | head -3; (yes; echo status $? >&2) | head -1")
	if got.status != 0 || !strings.HasPrefix(got.stdout, "y\ny\ny\ny\n") {
		t.Errorf("%+v", got)
	}
}

func TestBigInputToACommandThatDoesNotRead(t *testing.T) {
	r := newRig(t)
	got := r.run(bytes.NewReader(make([]byte, 16<<20)), "ssh", "w1", "head -c 1 | wc -c; exit 6")
	r.want(got, "1\n", 6)
}

func TestImageWithoutAShell(t *testing.T) {
	words, err := splitWords(`/app/tool  'a b' "c \"d" e\ f '' x"y"z | $HOME`)
	if err != nil || fmt.Sprintf("%q", words) != `["/app/tool" "a b" "c \"d" "e f" "" "xyz" "|" "$HOME"]` {
		t.Errorf("%q %v", words, err)
	}
	if _, err := splitWords(`a 'b`); err == nil {
		t.Error("an open quote was taken")
	}
}

func TestStopTellsSessionsWhy(t *testing.T) {
	r := newRig(t)
	type end struct{ result }
	ends := make(chan end, 1)
	go func() { ends <- end{r.ssh("echo up > up; sleep 60")} }()
	eventually(t, 10*time.Second, "command runs", func() bool { _, err := os.Stat(filepath.Join(r.home, "up")); return err == nil })
	r.each(func(s *Server) { s.Stop("workspace stopped: by its owner", errors.New("stop")) })
	got := <-ends
	if got.status == 0 || strings.Count(got.stderr, "carrel: workspace stopped: by its owner\n") != 1 || got.took > 10*time.Second {
		t.Errorf("%+v", got)
	}
}

func TestClosedChannelLeavesNoZombie(t *testing.T) {
	r := newRig(t)
	client := r.client()
	s, err := client.NewSession()
	r.must(err)
	out, err := s.StdoutPipe()
	r.must(err)
	r.must(s.Start("echo $$; exec sleep 1000"))
	pid, err := bufio.NewReader(out).ReadString('\n')
	r.must(err)
	r.must(s.Close()) // the connection stays
	stat := "/proc/" + strings.TrimSpace(pid)
	eventually(t, 5*time.Second, "the process is gone, also as a zombie", func() bool { _, err := os.Stat(stat); return os.IsNotExist(err) })
}
