package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Sizes of `make test`; CARREL_E2E_FULL=1 takes those that the promise names (5,000 files and 1 GiB), as `make soak` does.
func sizes() (files int, bytes int64) {
	if os.Getenv("CARREL_E2E_FULL") != "" {
		return 5000, 1 << 30
	}
	return 5000, 64 << 20
}

// writeRandom makes a file of incompressible bytes and returns its SHA-256.
func writeRandom(t *testing.T, path string, size int64, seed uint64) string {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	var key [32]byte
	key[0], key[1] = byte(seed), byte(seed>>8)
	sum := sha256.New()
	if _, err := io.CopyN(io.MultiWriter(f, sum), rand.NewChaCha8(key), size); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// writeTree makes a tree of small files, some with odd names, and links.
func writeTree(t *testing.T, dir string, files int) {
	t.Helper()
	for i := range files {
		sub := filepath.Join(dir, fmt.Sprintf("d%02d", i%50))
		if i < 50 {
			if err := os.MkdirAll(sub, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(sub, fmt.Sprintf("file %d.txt", i)), fmt.Appendf(nil, "%d %x\n", i, i*i), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/nowhere", filepath.Join(dir, "dangling")); err != nil {
		t.Fatal(err)
	}
}

// treeHash is a program that prints one hash over names and contents of the tree in its first argument.
const treeHash = `cd "$1" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum`

// TestFilesArriveWhole sends and fetches one big file and a tree with scp, sftp and rsync, and compares hashes.
func TestFilesArriveWhole(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	p := l.admin
	p.ok("up", "w1", "--image", testImage, "--gpu", "0")
	files, size := sizes()
	dir := t.TempDir()
	want := writeRandom(t, filepath.Join(dir, "big"), size, 1)
	tree := filepath.Join(dir, "tree")
	writeTree(t, tree, files)
	local, err := exec.Command("sh", "-c", treeHash, "sh", tree).Output() //nolint:noctx // short
	if err != nil {
		t.Fatal(err)
	}

	run := func(name string, args ...string) {
		t.Helper()
		if out, errs, code := p.program(nil, name, args...); code != 0 {
			t.Fatalf("%s %s: exit %d\n%s%s", name, strings.Join(args, " "), code, out, errs)
		}
	}
	same := func(how, path string) {
		t.Helper()
		if got := p.sshOK("w1.carrel", "sha256sum "+path); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s has another hash than what was sent", how, path)
		}
	}
	run("scp", "-F", p.config, filepath.Join(dir, "big"), "w1.carrel:by-scp")
	same("scp", "by-scp")
	batch := filepath.Join(dir, "batch")
	if err := os.WriteFile(batch, []byte("put "+filepath.Join(dir, "big")+" by-sftp\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	run("sftp", "-b", batch, "-F", p.config, "w1.carrel")
	same("sftp", "by-sftp")
	run("scp", "-F", p.config, "w1.carrel:by-scp", filepath.Join(dir, "back"))
	back, err := os.ReadFile(filepath.Join(dir, "back"))
	if sum := sha256.Sum256(back); err != nil || hex.EncodeToString(sum[:]) != want {
		t.Errorf("the file that came back differs (%v)", err)
	}

	readOnly := filepath.Join(dir, "read-only")
	if err := os.WriteFile(readOnly, []byte("kept as it is\n"), 0o400); err != nil {
		t.Fatal(err)
	}
	if _, errs, code := p.program(nil, "scp", "-F", p.config, readOnly, "w1.carrel:"); code != 0 || strings.Contains(errs, "denied") {
		t.Errorf("scp of a read-only file: exit %d\n%s", code, errs)
	}

	rsh := "ssh -F " + p.config
	run("rsync", "-a", "-e", rsh, tree+"/", "w1.carrel:tree/")
	remote, errs, code := p.ssh(strings.NewReader(treeHash), "w1.carrel", "bash -s tree")
	if code != 0 || remote != string(local) {
		t.Errorf("the tree differs in the workspace: exit %d\n%s%s", code, remote, errs)
	}
	run("rsync", "-a", "-e", rsh, "w1.carrel:tree/", filepath.Join(dir, "tree-back"))
	again, err := exec.Command("sh", "-c", treeHash, "sh", filepath.Join(dir, "tree-back")).Output() //nolint:noctx // short
	if err != nil || string(again) != string(local) {
		t.Errorf("the tree that came back differs (%v)", err)
	}
}

// oneFileServer answers every HTTP request with one line, and says so in a file once it listens. It needs no module beyond the
// smallest Python that Debian has.
const oneFileServer = `import socket
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", 8123))
s.listen(16)
with open("ready", "w") as f:
    f.write("ready\n")
while True:
    c, _ = s.accept()
    c.recv(65536)
    c.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 7\r\n\r\ninside\n")
    c.close()
`

// TestEditorsWay does what Remote-SSH does: a script on the stdin of `ssh -T -D PORT host bash`, then requests through the SOCKS port.
func TestEditorsWay(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	p := l.admin
	p.ok("up", "w1", "--image", testImage, "--gpu", "0")
	port := freePort(t)
	script := "cat > serve.py <<'END'\n" + oneFileServer + "END\npython3 serve.py &\nread -r ready < <(tail -F -n 1 ready 2>/dev/null)\necho serving\nsleep 600\n"
	client := exec.Command("ssh", "-F", p.config, "-T", "-D", port, "w1.carrel", "bash") //nolint:noctx // ended below
	client.Env, client.Stdin = p.env(), strings.NewReader(script)
	out, err := client.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	client.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = syscall.Kill(-client.Process.Pid, syscall.SIGKILL)
		_ = client.Wait()
	}()
	line := make([]byte, len("serving\n"))
	if _, err := io.ReadFull(out, line); err != nil || string(line) != "serving\n" {
		t.Fatalf("the script said %q (%v)", line, err)
	}
	for _, host := range []string{"127.0.0.1", "localhost"} {
		got, errs, code := p.program(nil, "curl", "--noproxy", "", "-sS", "--max-time", "20", "--proxy", "socks5h://127.0.0.1:"+port, "http://"+host+":8123/index")
		if code != 0 || got != "inside\n" {
			t.Errorf("through SOCKS to %s: exit %d, %q %s", host, code, got, errs)
		}
	}
	begun := time.Now()
	_, _, code := p.program(nil, "curl", "--noproxy", "", "-sS", "--max-time", "20", "--proxy", "socks5h://127.0.0.1:"+port, "http://127.0.0.1:8124/")
	if code == 0 || code == 28 || time.Since(begun) > 15*time.Second {
		t.Errorf("a closed port: curl exit %d after %s, want a prompt refusal", code, time.Since(begun))
	}
}
