package session

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pkg/sftp"
)

func (r *rig) sftp(script string) result {
	r.t.Helper()
	return r.run(strings.NewReader(script), "sftp", "-b", "-", "w1")
}

func TestSSH09RelativePathsStartAtHome(t *testing.T) {
	r := newRig(t)
	if got := r.sftp("pwd\n"); !strings.Contains(got.stdout, "Remote working directory: "+r.home+"\n") {
		t.Errorf("%+v", got)
	}
	r.want(r.ssh("mkdir -p .cache/x"), "", 0)
	local := filepath.Join(r.dir, "f")
	r.must(os.WriteFile(local, []byte("data"), 0o640))
	dir := filepath.Join(r.dir, "dir", "sub")
	r.must(os.MkdirAll(dir, 0o755))
	r.must(os.WriteFile(filepath.Join(dir, "g"), random(t, 100000), 0o600))
	for _, args := range [][]string{
		{local, "w1:.cache/x/"}, {"-r", filepath.Join(r.dir, "dir"), "w1:"}, {local, "w1:~/y"}, {"-p", local, "w1:kept"}, {"-O", local, "w1:old"},
	} {
		if got := r.run(nil, "scp", args...); got.status != 0 {
			t.Errorf("scp %v: %+v", args, got)
		}
	}
	r.want(r.ssh("cat .cache/x/f y kept old; cksum < dir/sub/g | cut -d' ' -f2; stat -c %a kept dir/sub/g"), "datadatadatadata100000\n640\n600\n", 0)
}

func TestSSH11Rename(t *testing.T) {
	r := newRig(t)
	write := func() {
		r.must(os.WriteFile(filepath.Join(r.home, "a"), []byte("new"), 0o644))
		r.must(os.WriteFile(filepath.Join(r.home, "b"), []byte("old"), 0o644))
	}
	content := func() string { b, _ := os.ReadFile(filepath.Join(r.home, "b")); return string(b) }
	write()
	if got := r.sftp("rename a b\n"); got.status != 0 || content() != "new" {
		t.Errorf("OpenSSH's rename: %+v, b is %q", got, content())
	}
	write()
	client, err := sftp.NewClient(r.client())
	r.must(err)
	defer client.Close()
	if err := client.Rename("a", "b"); err == nil || content() != "old" {
		t.Errorf("version 3 rename: %v, b is %q", err, content())
	}
	r.must(client.Rename("a", "c"))
	r.must(client.PosixRename("c", "b"))
	if content() != "new" {
		t.Errorf("posix-rename: b is %q", content())
	}
	for _, ext := range []string{"posix-rename@openssh.com", "statvfs@openssh.com", "fsync@openssh.com", "hardlink@openssh.com"} {
		if _, ok := client.HasExtension(ext); !ok {
			t.Errorf("%s is not offered", ext)
		}
	}
	r.must(client.Link("b", "hard"))
	if st, err := client.StatVFS("."); err != nil || st.Bsize == 0 || st.Blocks == 0 {
		t.Errorf("statvfs %+v %v", st, err)
	}
}

func TestSSH12DanglingLinksAndBigDirectories(t *testing.T) {
	r := newRig(t)
	r.want(r.ssh("mkdir d; touch d/a; ln -s /nope d/broken; ln -s / d/up; mkdir d/sub"), "", 0)
	got := r.sftp("ls -la d\n")
	for _, want := range []struct{ name, kind string }{{"a", "-"}, {"broken", "l"}, {"up", "l"}, {"sub", "d"}} {
		found := false
		for line := range strings.Lines(got.stdout) {
			found = found || strings.HasPrefix(line, want.kind) && strings.HasSuffix(strings.TrimSpace(line), "/"+want.name) || strings.HasPrefix(line, want.kind) && strings.HasSuffix(strings.TrimSpace(line), " "+want.name)
		}
		if !found {
			t.Errorf("%+v is not in %s", want, got.stdout)
		}
	}
	r.must(os.Mkdir(filepath.Join(r.home, "big"), 0o755))
	for n := range 50000 {
		r.must(os.WriteFile(fmt.Sprintf("%s/big/n%05d", r.home, n), nil, 0o644))
	}
	got = r.sftp("ls -1 big\n")
	if n := strings.Count(got.stdout, "big/n"); n != 50000 || got.status != 0 {
		t.Errorf("%d names, %s", n, got.stderr)
	}
}

func TestSFTPFilesAndErrors(t *testing.T) {
	r := newRig(t)
	client, err := sftp.NewClient(r.client(), sftp.UseConcurrentWrites(true))
	r.must(err)
	defer client.Close()
	data := random(t, 5<<20)
	f, err := client.Create("file")
	r.must(err)
	if _, err := f.ReadFrom(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	r.must(f.Sync())
	r.must(f.Truncate(4 << 20))
	r.must(f.Chmod(0o600))
	r.must(f.Close())
	got, err := os.ReadFile(filepath.Join(r.home, "file"))
	if err != nil || !bytes.Equal(got, data[:4<<20]) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	var back bytes.Buffer
	f, err = client.Open("file")
	r.must(err)
	if _, err := f.WriteTo(&back); err != nil || !bytes.Equal(back.Bytes(), got) {
		t.Errorf("read back %d bytes, %v", back.Len(), err)
	}
	r.must(f.Close())
	if _, err := client.Stat("none"); !os.IsNotExist(err) {
		t.Errorf("missing file: %v", err)
	}
	if _, err := client.Open(strings.Repeat("x", 5000)); err == nil {
		t.Error("a name of 5,000 letters was opened")
	}
	if _, err := client.OpenFile("file", os.O_CREATE|os.O_EXCL|os.O_WRONLY); err == nil {
		t.Error("exclusive create of a file that is there")
	}
	r.must(client.Symlink("file", "link"))
	if target, err := client.ReadLink("link"); err != nil || target != "file" {
		t.Errorf("%q %v", target, err)
	}
	r.must(client.Mkdir("dir"))
	if err := client.RemoveDirectory("dir/../none"); err == nil {
		t.Error("a missing directory was removed")
	}
	f, err = client.OpenFile("log", os.O_CREATE|os.O_WRONLY|os.O_APPEND)
	r.must(err)
	_, err = f.Write([]byte("one"))
	r.must(err)
	r.must(f.Close())
}

func TestRsyncTree(t *testing.T) {
	r := newRig(t)
	tree := filepath.Join(r.dir, "tree")
	for n := range 300 {
		dir := fmt.Sprintf("%s/%d", tree, n%10)
		r.must(os.MkdirAll(dir, 0o755))
		r.must(os.WriteFile(fmt.Sprintf("%s/f%d", dir, n), random(t, n*37), 0o644))
	}
	if got := r.run(nil, "rsync", "-a", tree, "w1:"); got.status != 0 {
		t.Fatalf("%+v", got)
	}
	if got := r.run(nil, "rsync", "-anci", "--delete", tree, "w1:"); got.status != 0 || got.stdout != "" {
		t.Errorf("differs: %+v", got)
	}
}
