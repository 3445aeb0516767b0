package initlink_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/carrel-dev/carrel/agent/initlink"
	"github.com/carrel-dev/carrel/agent/initlink/preamble"
	"github.com/carrel-dev/carrel/proto/stream"
)

// kills is how often TestSessionsSurviveServe kills serve; each costs up to init's longest restart delay, 2 s.
var kills = flag.Int("kills", 12, "how often serve is killed in TestSessionsSurviveServe")

func TestSessionsSurviveServe(t *testing.T) {
	b := newBox(t)
	client := b.client()
	// A transfer with a rekey every 256 KiB goes on over all of it: each rekey needs a signature by whichever serve there is.
	transfer := exec.Command("ssh", "-F", filepath.Join(b.dir, "config"), "-o", "RekeyLimit=256K", "demo.carrel", "cat")
	var back bytes.Buffer
	transfer.Stdout = &back
	in, err := transfer.StdinPipe()
	b.must(err)
	b.must(transfer.Start())
	block := bytes.Repeat([]byte("carrel! "), 16<<10)
	sum := sha256.New()
	for range *kills {
		b.killServe()
		sum.Write(block)
		if _, err := in.Write(block); err != nil {
			t.Fatal(err)
		}
		if out, err := output(client, "echo alive"); err != nil || out != "alive\n" {
			t.Fatalf("%q %v", out, err)
		}
	}
	killed := time.Now()
	fresh := b.ssh("echo new")
	b.want(fresh, "new\n", 0)
	if took := time.Since(killed); took > 4*time.Second {
		t.Errorf("a new session came after %v", took)
	}
	b.must(in.Close())
	b.must(transfer.Wait())
	if got := sha256.Sum256(back.Bytes()); !bytes.Equal(got[:], sum.Sum(nil)) {
		t.Errorf("%d bytes came back changed", back.Len())
	}
	eventually(t, 5*time.Second, "the session was taken back", func() bool {
		a, err := b.current().Activity(b.ctx(5*time.Second), b.key)
		return err == nil && a.SSHSessions == 1
	})
}

func TestRemovedKeyEndsItsSessions(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("serve restarted %v", restart), func(t *testing.T) {
			b := newBox(t)
			client := b.client()
			ended := make(chan error, 1)
			go func() { ended <- client.Wait() }()
			other := b.newKey("other")
			if restart {
				b.killServe()
				eventually(t, 5*time.Second, "the session was taken back", func() bool {
					a, err := b.current().Activity(b.ctx(5*time.Second), b.key)
					return err == nil && a.SSHSessions == 1
				})
			}
			both := []string{b.cfg.AuthorizedKeys[0], string(ssh.MarshalAuthorizedKey(other.PublicKey()))}
			b.must(b.current().Update(b.ctx(10*time.Second), b.key, both, b.cfg.HostCertificate))
			if out, err := output(client, "echo still here"); err != nil || out != "still here\n" {
				t.Fatalf("%q %v", out, err)
			}
			b.must(b.current().Update(b.ctx(10*time.Second), b.key, both[1:], b.cfg.HostCertificate))
			select {
			case <-ended:
			case <-time.After(5 * time.Second):
				t.Fatal("the session of the removed key goes on")
			}
			if got := b.ssh("true"); got.status != 255 || !strings.Contains(got.stderr, "Permission denied (publickey)") {
				t.Errorf("%+v", got)
			}
		})
	}
}

// TestT20Decoys: only process 1 and its direct children, as root, are listened to.
func TestT20Decoys(t *testing.T) {
	b := newBox(t, withSudo)
	socket := filepath.Join(b.dir, "links", b.key.Workspace+"-1", initlink.SocketName)
	info, err := os.Stat(socket)
	b.must(err)
	if info.Mode().Perm() != 0o600 {
		t.Errorf("socket mode %v", info.Mode())
	}
	conn, err := net.Dial("unix", socket)
	b.must(err)
	defer conn.Close()
	_ = preamble.Write(conn, preamble.Preamble{Kind: preamble.Control}) // it may be refused before
	b.must(conn.SetReadDeadline(time.Now().Add(5 * time.Second)))
	if n, err := conn.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a process of the host is talked to: %d bytes, %v", n, err)
	}
	// Root inside, but no child of process 1; then a child of process 1 that is not serve, while serve lives.
	talk := `import socket,sys
s=socket.socket(socket.AF_UNIX); s.settimeout(5); s.connect("/run/carrel-agent/link.sock")
try: s.sendall(b"carrel-init/1 control\n"); r=s.recv(1)
except ConnectionError: r=b""
open("/home/ana/"+sys.argv[1],"w").write(repr(r))
`
	b.must(os.WriteFile(filepath.Join(b.dir, "home", "talk.py"), []byte(talk), 0o644))
	for name, cmd := range map[string]string{
		"grandchild": "sudo python3 talk.py grandchild",
		"child":      "sudo setsid -f python3 talk.py child; sleep 1",
		"stranger":   `sudo setsid -f sh -c 'sleep 0.3; exec python3 talk.py stranger'; sleep 1`,
	} {
		b.ssh(cmd)
		answer := filepath.Join(b.dir, "home", name)
		eventually(t, 10*time.Second, name+" got its answer", func() bool { text, _ := os.ReadFile(answer); return len(text) > 0 })
		if text, _ := os.ReadFile(answer); string(text) != "b''" {
			t.Errorf("%s is talked to: %s", name, text)
		}
	}
	b.want(b.ssh("echo fine"), "fine\n", 0)
}

func TestConnectionsOfARunAreCapped(t *testing.T) {
	dir := t.TempDir()
	links, err := initlink.New(initlink.Options{Dir: dir, Pending: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer links.Close()
	linkDir, err := links.Prepare(initlink.Key{Workspace: "w", Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	closed := 0
	for range 20 { // nobody is attached: all of them wait, or are turned away
		conn, err := net.Dial("unix", filepath.Join(linkDir, initlink.SocketName))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	for range 200 {
		conn, err := net.Dial("unix", filepath.Join(linkDir, initlink.SocketName))
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(time.Second))
		if _, err := conn.Read(make([]byte, 1)); errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
			closed++
		}
		conn.Close()
	}
	if closed != 200 {
		t.Errorf("%d of 200 connections above the cap were closed", closed)
	}
}

func TestAgentRestart(t *testing.T) {
	b := newBox(t)
	b.want(b.ssh("setsid nohup sleep 1234 >/dev/null 2>&1 </dev/null & echo ok"), "ok\n", 0)
	serve := b.servePID()
	b.must(b.current().Close())
	if _, err := b.current().Prepare(b.key); !errors.Is(err, initlink.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	b.openLinks()
	begin := time.Now()
	_, err := b.current().Prepare(b.key)
	b.must(err)
	b.must(b.current().Attach(b.key, b.pid))
	_, err = b.current().Configure(b.ctx(10*time.Second), b.key, b.cfg)
	b.must(err)
	if took := time.Since(begin); took > 1500*time.Millisecond {
		t.Errorf("carrel-init was back after %v", took)
	}
	b.want(b.ssh("pgrep -fc '^sleep 1234$'"), "1\n", 0)
	if b.servePID() != serve {
		t.Error("serve was replaced")
	}
}

func TestSSH08StopTellsEveryClient(t *testing.T) {
	for _, way := range []string{"agent", "SIGTERM", "SIGKILL"} {
		t.Run(way, func(t *testing.T) {
			b := newBox(t)
			ends := make(chan result, 3)
			port := freePort(t)
			go func() { ends <- b.run(nil, "ssh", "-tt", "demo.carrel", "echo up > up1; sleep 100") }()
			go func() { ends <- b.run(nil, "ssh", "-N", "-D", port, "demo.carrel") }()
			// A slow transfer: idle, the sftp program reads its script and looks at nothing else.
			b.must(os.WriteFile(filepath.Join(b.dir, "home", "big"), nil, 0o644))
			b.must(os.Truncate(filepath.Join(b.dir, "home", "big"), 1<<30))
			get := "get big " + filepath.Join(b.dir, "big") + "\n"
			go func() { ends <- b.run(strings.NewReader(get), "sftp", "-l", "8000", "-b", "-", "demo.carrel") }()
			eventually(t, 20*time.Second, "three sessions are there", func() bool {
				a, err := b.current().Activity(b.ctx(5*time.Second), b.key)
				_, up := os.Stat(filepath.Join(b.dir, "home", "up1"))
				conn, forward := net.Dial("tcp", "127.0.0.1:"+port)
				if forward == nil {
					conn.Close()
				}
				_, getting := os.Stat(filepath.Join(b.dir, "big"))
				return err == nil && a.SSHSessions == 3 && up == nil && forward == nil && getting == nil
			})
			begin := time.Now()
			switch way {
			case "agent":
				b.must(b.current().Stop(b.ctx(5*time.Second), b.key, "by ana", 5*time.Second))
			default:
				b.engine.call("POST", "/containers/"+b.id+"/kill?signal="+way, nil, nil)
			}
			told := 0
			for range 3 {
				got := <-ends
				if got.status == 0 {
					t.Errorf("ended well: %+v", got)
				}
				told += strings.Count(got.stdout+got.stderr, "workspace stopped")
			}
			if took := time.Since(begin); took > 10*time.Second {
				t.Errorf("clients ended after %v", took)
			}
			if way != "SIGKILL" && told != 2 { // the -N client has no channel to hear it on
				t.Errorf("%d clients were told", told)
			}
			eventually(t, 10*time.Second, "the container ended", func() bool { return !b.engine.inspect(b.id).State.Running })
			if code := b.engine.inspect(b.id).State.ExitCode; way != "SIGKILL" && code != 0 {
				t.Errorf("exit code %d", code)
			}
		})
	}
}

func TestStopGivesProgramsTheirGrace(t *testing.T) {
	b := newBox(t)
	script := `trap 'echo term >> log; exit' TERM; trap 'echo hup >> log' HUP; touch polite; while :; do sleep 0.05; done`
	b.must(os.WriteFile(filepath.Join(b.dir, "home", "polite.sh"), []byte(script), 0o755))
	b.ssh("setsid bash polite.sh >/dev/null 2>&1 </dev/null & setsid sh -c 'trap \"\" TERM HUP; touch stubborn; while :; do sleep 0.1; done' >/dev/null 2>&1 </dev/null &")
	eventually(t, 10*time.Second, "both run", func() bool {
		_, err1 := os.Stat(filepath.Join(b.dir, "home", "polite"))
		_, err2 := os.Stat(filepath.Join(b.dir, "home", "stubborn"))
		return err1 == nil && err2 == nil
	})
	begin := time.Now()
	b.must(b.current().Stop(b.ctx(5*time.Second), b.key, "", 3*time.Second))
	eventually(t, 10*time.Second, "the container ended", func() bool { return !b.engine.inspect(b.id).State.Running })
	if took := time.Since(begin); took < 2*time.Second || took > 6*time.Second {
		t.Errorf("ended after %v; the grace was 3 s", took)
	}
	log, err := os.ReadFile(filepath.Join(b.dir, "home", "log"))
	b.must(err)
	if string(log) != "hup\nterm\n" {
		t.Errorf("signals %q", log)
	}
}

func TestHostileStreamsOfAContainer(t *testing.T) {
	// T-27: what carrel-init sends is bytes to the agent; a stream to a run that never answers ends by its limit.
	dir := t.TempDir()
	links, err := initlink.New(initlink.Options{Dir: dir, StreamWait: 300 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer links.Close()
	key := initlink.Key{Workspace: "w", Epoch: 1}
	if _, err := links.OpenStream(t.Context(), key, stream.Hello{Kind: "ssh"}); !errors.Is(err, initlink.ErrUnknownRun) {
		t.Errorf("unknown run: %v", err)
	}
	if _, err := links.Prepare(key); err != nil {
		t.Fatal(err)
	}
	if _, err := links.OpenStream(t.Context(), key, stream.Hello{Kind: "ssh"}); !errors.Is(err, initlink.ErrNotConnected) {
		t.Errorf("no carrel-init: %v", err)
	}
	if _, err := links.Prepare(initlink.Key{Workspace: "../x", Epoch: 1}); err == nil {
		t.Error("a workspace id that leaves the directory was taken")
	}
	if err := links.Forget(key); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "w-1")); !os.IsNotExist(err) {
		t.Errorf("after Forget: %v", err)
	}
}

func freePort(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}
