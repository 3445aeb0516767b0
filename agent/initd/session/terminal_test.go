package session

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// driven is a client program on a terminal that the test drives.
type driven struct {
	t   *testing.T
	tty *terminal
	cmd *exec.Cmd

	mu  sync.Mutex
	out bytes.Buffer
}

func (r *rig) drive(t *testing.T, args ...string) *driven {
	t.Helper()
	tty, slave, err := openTerminal()
	r.must(err)
	d := &driven{t: t, tty: tty, cmd: r.command(t.Context(), "ssh", append([]string{"-tt", "w1"}, args...)...)}
	tty.setSize(unix.Winsize{Row: 24, Col: 80})
	d.cmd.Stdin, d.cmd.Stdout, d.cmd.Stderr = slave, slave, slave
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	r.must(d.cmd.Start())
	slave.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 64<<10)
		for {
			n, err := tty.Read(buf)
			d.mu.Lock()
			d.out.Write(buf[:n])
			d.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = d.cmd.Process.Kill()
		_ = d.cmd.Wait()
		tty.close()
		<-done
	})
	return d
}

func (d *driven) output() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.out.String()
}

func (d *driven) typeText(text string) {
	d.t.Helper()
	if _, err := d.tty.master.WriteString(text); err != nil {
		d.t.Fatal(err)
	}
}

func TestSSH04ManyResizes(t *testing.T) {
	r := newRig(t)
	d := r.drive(t, "echo ready; cat; stty size")
	eventually(t, 10*time.Second, "the command runs", func() bool { return strings.Contains(d.output(), "ready") })
	stop := make(chan struct{})
	var typing sync.WaitGroup
	typing.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Millisecond):
				d.typeText(fmt.Sprintf("line %d\n", n))
			}
		}
	})
	for n := range 3000 {
		d.tty.setSize(unix.Winsize{Row: uint16(20 + n%30), Col: uint16(60 + n%100)})
		time.Sleep(time.Millisecond) //nolint:forbidigo // the case's rate: 3,000 changes in some seconds
	}
	d.tty.setSize(unix.Winsize{Row: 41, Col: 133})
	close(stop)
	typing.Wait()
	d.typeText("ping\n")
	eventually(t, 2*time.Second, "ping comes back twice: echo and cat", func() bool { return strings.Count(d.output(), "ping") == 2 })
	for n := range 20 {
		if got := strings.Count(d.output(), fmt.Sprintf("line %d\r\n", n)); got != 2 {
			t.Errorf("line %d came back %d times", n, got)
		}
	}
	d.typeText("\x04")
	eventually(t, 5*time.Second, "the last size holds", func() bool { return strings.Contains(d.output(), "41 133") })
}

func TestSSH21LargePaste(t *testing.T) {
	r := newRig(t)
	raw := make([]byte, 32*24576)
	if _, err := rand.Read(raw); err != nil {
		t.Fatal(err)
	}
	text := base64.StdEncoding.EncodeToString(raw) // exactly 1 MiB
	var lines strings.Builder
	for ; len(text) > 0; text = text[42:] {
		if len(text) < 42 {
			break
		}
		lines.WriteString(text[:42] + "\n")
	}
	data := lines.String()
	want := fmt.Sprintf("%x", sha256.Sum256([]byte(data)))
	for _, mode := range []string{"raw -echo", "-echo"} {
		d := r.drive(t, fmt.Sprintf("stty %s; echo RDY; head -c %d | sha256sum", mode, len(data)))
		eventually(t, 10*time.Second, "the command runs", func() bool { return strings.Contains(d.output(), "RDY") })
		begin := time.Now()
		for rest := data; len(rest) > 0; {
			n := min(4096, len(rest))
			d.typeText(rest[:n])
			rest = rest[n:]
		}
		eventually(t, 15*time.Second, mode+": the hash is right", func() bool { return strings.Contains(d.output(), want) })
		t.Logf("%s: %v", mode, time.Since(begin))
	}
}

func TestShellOnATerminal(t *testing.T) {
	r := newRig(t)
	d := r.drive(t)
	d.typeText("echo $0 $TERM; tty; [ $(tty) = $SSH_TTY ] && echo same; exit 5\n")
	if err := d.cmd.Wait(); err == nil || d.cmd.ProcessState.ExitCode() != 5 {
		t.Errorf("%v; %s", err, d.output())
	}
	eventually(t, 5*time.Second, "a login shell on its own terminal", func() bool {
		out := d.output()
		return strings.Contains(out, "-bash ") && strings.Contains(out, "/dev/pts/") && strings.Contains(out, "\nsame\r")
	})
}

func TestTerminalModesAreApplied(t *testing.T) {
	var termios unix.Termios
	termios.Lflag = unix.ECHO | unix.ICANON
	modes := []byte{53, 0, 0, 0, 0, 50, 0, 0, 0, 1, 3, 0, 0, 0, 8, 13, 0, 0, 0, 255, 42, 0, 0, 0, 1, 0, 51, 0, 0, 0, 0}
	setModes(&termios, modes)
	if termios.Lflag != unix.ICANON|unix.ISIG || termios.Cc[unix.VERASE] != 8 || termios.Cc[unix.VWERASE] != 0 || termios.Iflag != unix.IUTF8 {
		t.Errorf("%+v", termios)
	}
	setModes(&termios, []byte{51, 0, 0}) // cut short
	if termios.Lflag&unix.ICANON == 0 {
		t.Error("a cut mode was applied")
	}
}

func TestSSH29AgentForwarding(t *testing.T) {
	agentDir := t.TempDir()
	socket := agentDir + "/agent"
	agent := exec.Command("ssh-agent", "-D", "-a", socket)
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = agent.Process.Kill(); _ = agent.Wait() })
	eventually(t, 5*time.Second, "ssh-agent runs", func() bool { _, err := os.Stat(socket); return err == nil })
	runtime := t.TempDir()
	r := newRig(t, func(c *Config) {
		c.RuntimeDir = "" // one directory per connection, as serve gives
		dir, err := os.MkdirTemp(runtime, "s")
		if err == nil && os.Chmod(dir, 0o700) == nil {
			c.RuntimeDir = dir
		}
	})
	add := exec.Command("ssh-add", "-q", r.dir+"/id")
	add.Env = append(os.Environ(), "SSH_AUTH_SOCK="+socket)
	if out, err := add.CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	r.env = []string{"SSH_AUTH_SOCK=" + socket}
	show := `ssh-add -l; stat -c "%a %F" $SSH_AUTH_SOCK $(dirname $SSH_AUTH_SOCK)`
	a := r.command(t.Context(), "ssh", "-A", "w1", "touch a; sleep 60")
	r.must(a.Start())
	eventually(t, 10*time.Second, "A runs", func() bool { _, err := os.Stat(r.home + "/a"); return err == nil })
	ends := make(chan result, 1)
	go func() {
		ends <- r.run(nil, "ssh", "-A", "w1", show+"; touch b; while [ -e a ]; do sleep 0.05; done; ssh-add -l")
	}()
	eventually(t, 10*time.Second, "B runs", func() bool { _, err := os.Stat(r.home + "/b"); return err == nil })
	_ = a.Process.Kill()
	_ = a.Wait()
	r.must(os.Remove(r.home + "/a"))
	got := <-ends
	if strings.Count(got.stdout, "ED25519") != 2 || !strings.Contains(got.stdout, "600 socket\n700 directory\n") || got.status != 0 {
		t.Errorf("%+v", got)
	}
	eventually(t, 10*time.Second, "no socket is left", func() bool {
		left, err := filepath.Glob(runtime + "/*/*")
		return err == nil && len(left) == 0
	})
	r.env = nil
	if got := r.ssh("echo [$SSH_AUTH_SOCK]"); got.stdout != "[]\n" {
		t.Errorf("without -A: %+v", got)
	}
}
