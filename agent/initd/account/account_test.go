package account

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func user() User {
	return User{Login: "ana", UID: 12345, GID: 12346, Groups: []Group{{"lab", 20000}, {"video", 44}}, Home: "/home/ana"}
}

func TestPasswdLines(t *testing.T) {
	ours := "ana:x:12345:12346::/home/ana:/bin/bash\n"
	for name, c := range map[string]struct{ old, want string }{
		"no file":                 {"", ours},
		"added":                   {"root:x:0:0::/root:/bin/sh\n", "root:x:0:0::/root:/bin/sh\n" + ours},
		"no newline at the end":   {"root:x:0:0::/root:/bin/sh", "root:x:0:0::/root:/bin/sh\n" + ours},
		"image's uid gives way":   {"ubuntu:x:12345:1000:U:/home/ubuntu:/bin/zsh\n", ours},
		"image's login gives way": {"ana:x:1000:1000:A:/home/a:/bin/zsh\n", ours},
		"chsh is kept":            {"ana:x:12345:12346:Ana:/old:/bin/zsh\n", "ana:x:12345:12346:Ana:/home/ana:/bin/zsh\n"},
		"broken line is kept":     {"what\n", "what\n" + ours},
	} {
		got := passwdLines(c.old, "/bin/bash", user())
		if got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if again := passwdLines(got, "/bin/bash", user()); again != got {
			t.Errorf("%s: a second time gives %q", name, again)
		}
	}
}

func TestGroupLines(t *testing.T) {
	for name, c := range map[string]struct{ old, want string }{
		"no file":            {"", "ana:x:12346:\nlab:x:20000:ana\nvideo:x:44:ana\n"},
		"members are kept":   {"video:x:44:bo\n", "video:x:44:bo,ana\nana:x:12346:\nlab:x:20000:ana\n"},
		"name is taken":      {"lab:x:5:\nana:x:6:\n", "lab:x:5:\nana:x:6:\nana-12346:x:12346:\nlab-20000:x:20000:ana\nvideo:x:44:ana\n"},
		"gid has other name": {"users:x:12346:\n", "users:x:12346:\nlab:x:20000:ana\nvideo:x:44:ana\n"},
	} {
		got := groupLines(c.old, user())
		if got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if again := groupLines(got, user()); again != got {
			t.Errorf("%s: a second time gives %q", name, again)
		}
	}
}

func write(t *testing.T, root, path, text string, mode os.FileMode) {
	t.Helper()
	full := filepath.Join(root, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

func owner(t *testing.T, path string) (uid, gid int) {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	return int(st.Uid), int(st.Gid)
}

func TestApply(t *testing.T) {
	root := t.TempDir()
	write(t, root, "bin/bash", "", 0o755)
	write(t, root, "usr/bin/sudo", "", 0o755)
	write(t, root, "etc/shadow", "root:*:1:0:99999:7:::\n", 0o640)
	write(t, root, "etc/skel/.config/x", "skel", 0o600)
	if err := os.Symlink("/nope", filepath.Join(root, "etc/skel/link")); err != nil {
		t.Fatal(err)
	}
	got, err := Apply(root, Request{User: user(), Sudo: true})
	if err != nil || got != (Result{Sudo: SudoYes, Shell: "/bin/bash"}) {
		t.Fatalf("%+v %v", got, err)
	}
	for path, mode := range map[string]os.FileMode{"etc/passwd": 0o644, "etc/group": 0o644, "etc/shadow": 0o640, "etc/sudoers.d/carrel": 0o440, "home/ana/.config/x": 0o600} {
		if info, err := os.Stat(filepath.Join(root, path)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v %v", path, info, err)
		}
	}
	for _, path := range []string{"home/ana", "home/ana/.config", "home/ana/.config/x", "home/ana/link"} {
		if uid, gid := owner(t, filepath.Join(root, path)); uid != 12345 || gid != 12346 {
			t.Errorf("%s belongs to %d:%d", path, uid, gid)
		}
	}
	// A second start: what the user changed stays, and nothing below the home changes hands (CONT-12).
	write(t, root, "home/ana/mine", "", 0o644)
	if err := os.RemoveAll(filepath.Join(root, "home/ana/.config")); err != nil {
		t.Fatal(err)
	}
	if got, err = Apply(root, Request{User: user(), Sudo: false}); err != nil || got.Sudo != SudoNotInPool {
		t.Fatalf("%+v %v", got, err)
	}
	if uid, _ := owner(t, filepath.Join(root, "home/ana/mine")); uid != os.Getuid() {
		t.Error("a file below the home changed hands")
	}
	for _, gone := range []string{"etc/sudoers.d/carrel", "home/ana/.config"} {
		if _, err := os.Stat(filepath.Join(root, gone)); !os.IsNotExist(err) {
			t.Errorf("%s: %v", gone, err)
		}
	}
}

func TestApplyInAnEmptyImage(t *testing.T) {
	root := t.TempDir()
	got, err := Apply(root, Request{User: user(), Sudo: true})
	if err != nil || got != (Result{Sudo: SudoNotThere}) {
		t.Fatalf("%+v %v", got, err)
	}
	if _, err := os.Stat(filepath.Join(root, "etc/shadow")); !os.IsNotExist(err) {
		t.Errorf("a shadow file was made: %v", err)
	}
}

func TestHomeOfAnotherUser(t *testing.T) {
	root := t.TempDir()
	write(t, root, "home/ana/f", "", 0o644)
	if err := os.Chown(filepath.Join(root, "home/ana"), 4321, 4321); err != nil {
		t.Fatal(err)
	}
	_, err := Apply(root, Request{User: user()})
	if !errors.Is(err, ErrHomeOwner) || !strings.Contains(err.Error(), "4321") {
		t.Errorf("got %v", err)
	}
}

func TestBadUsers(t *testing.T) {
	for name, change := range map[string]func(*User){
		"root": func(u *User) { u.UID = 0 }, "system": func(u *User) { u.UID = 999 }, "gid": func(u *User) { u.GID = 0 },
		"colon": func(u *User) { u.Login = "a:b" }, "newline": func(u *User) { u.Login = "a\nb" }, "long": func(u *User) { u.Login = strings.Repeat("a", 33) },
		"empty": func(u *User) { u.Login = "" }, "relative home": func(u *User) { u.Home = "home" }, "root home": func(u *User) { u.Home = "/" },
		"dots": func(u *User) { u.Home = "/home/../etc" }, "group": func(u *User) { u.Groups = []Group{{"a:b", 5}} }, "group 0": func(u *User) { u.Groups = []Group{{"root", 0}} },
	} {
		u := user()
		change(&u)
		root := t.TempDir()
		if _, err := Apply(root, Request{User: u}); err == nil {
			t.Errorf("%s was taken", name)
		}
		if left, _ := os.ReadDir(root); len(left) > 0 {
			t.Errorf("%s: %v was left behind", name, left)
		}
	}
}
