package sshconfig

import (
	"context"
	"crypto/ed25519"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/crypto/ssh"
)

func caKey(t testing.TB) string {
	t.Helper()
	key, err := ssh.NewPublicKey(ed25519.PublicKey(make([]byte, ed25519.PublicKeySize)))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))
}

func host(name string) Host {
	return Host{WorkspaceID: "id" + strings.ReplaceAll(name, "-", ""), Workspace: name, Login: "ana", Principal: name + ".carrel.id" + strings.ReplaceAll(name, "-", "")}
}

func lab(t testing.TB, hosts ...Host) Deployment {
	return Deployment{
		Name: "lab", Primary: true, ProxyArgv: []string{"/usr/bin/carrel", "proxy", "--deployment", "lab"}, KnownHosts: "/home/ana/.config/carrel/known_hosts",
		Identity: "/home/ana/.config/carrel/id_ed25519", CAKeys: []string{caKey(t)}, Hosts: hosts,
	}
}

func includeLine(t *testing.T, p Place) string {
	t.Helper()
	line, err := p.IncludeLine()
	if err != nil {
		t.Fatal(err)
	}
	return line
}

func free(string) bool { return false }

// effective is what ssh itself makes of a configuration file for a host: keyword to values.
func effective(t testing.TB, file, alias string) map[string][]string {
	t.Helper()
	out, err := exec.Command("ssh", "-G", "-F", file, alias).CombinedOutput()
	if err != nil {
		t.Fatalf("ssh -G %s: %v\n%s", alias, err, out)
	}
	got := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), " ")
		got[k] = append(got[k], v)
	}
	return got
}

func expect(t *testing.T, got map[string][]string, key string, want ...string) {
	t.Helper()
	if !slices.Equal(got[key], want) {
		t.Errorf("%s: %q, want %q", key, got[key], want)
	}
}

// setUp writes a person's configuration and ours into a directory and returns the place.
func setUp(t *testing.T, dir, userConfig string, d Deployment) Place {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	p := PlaceFor(filepath.Join(dir, "config"), "/nowhere")
	if userConfig != "" {
		if err := os.WriteFile(p.User, []byte(userConfig), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(t, p, d)
	if _, err := p.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p
}

func write(t *testing.T, p Place, d Deployment) []Entry {
	t.Helper()
	names := p.Names()
	entries := Entries([]Deployment{d}, func(a string) bool { _, ok := names[a]; return ok })
	content, err := Render([]Deployment{d}, entries, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.WriteManaged(t.Context(), content); err != nil {
		t.Fatal(err)
	}
	return entries
}

func TestBlockIsWhatSSHTakes(t *testing.T) {
	p := setUp(t, t.TempDir(), "Host *\n  User root\n  ForwardAgent yes\n  ProxyCommand /bin/false\n  ForwardX11 yes\n  CanonicalizeHostname yes\n  HostName wrong.example\n", lab(t, host("w1")))
	got := effective(t, p.User, "w1.carrel")
	expect(t, got, "user", "ana")
	expect(t, got, "hostkeyalias", "w1.carrel.idw1")
	expect(t, got, "proxycommand", "/usr/bin/carrel proxy --deployment lab --workspace idw1")
	expect(t, got, "userknownhostsfile", "/home/ana/.config/carrel/known_hosts")
	expect(t, got, "globalknownhostsfile", "none")
	expect(t, got, "stricthostkeychecking", "true")
	expect(t, got, "identityfile", "/home/ana/.config/carrel/id_ed25519")
	expect(t, got, "identitiesonly", "yes")
	expect(t, got, "canonicalizehostname", "false")
	expect(t, got, "forwardagent", "no") // T-30
	expect(t, got, "forwardx11", "no")
	expect(t, got, "permitlocalcommand", "no")
	expect(t, got, "serveraliveinterval", "15")
	expect(t, got, "serveralivecountmax", "3")
	if c := got["ciphers"]; len(c) != 1 || !strings.HasPrefix(c[0], "aes128-gcm@openssh.com,") {
		t.Errorf("ciphers %q", c)
	}
}

// CLI-06: the person's own configuration around ours.
func TestUserHostsAreUnchanged(t *testing.T) {
	for name, config := range map[string]string{
		"star first":   "Host *\n  ProxyCommand /bin/star\n  User root\n  ControlMaster auto\n  ForwardAgent yes\nHost w1\n  User one\nHost my.w1\n  User two\n",
		"include":      "Include conf.d/*\nHost w1\n  User one\n",
		"match last":   "Host w1\n  User one\nMatch host x\n",
		"no final eol": "Host w1\n  User one",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			plain := filepath.Join(dir, "plain")
			if err := os.WriteFile(plain, []byte(config), 0o600); err != nil {
				t.Fatal(err)
			}
			p := setUp(t, dir, config, lab(t, host("w1")))
			for _, h := range []string{"w1", "my.w1", "x", "other.example"} {
				with, without := effective(t, p.User, h), effective(t, plain, h)
				for k := range without {
					if !slices.Equal(with[k], without[k]) {
						t.Errorf("%s of %s: %q, was %q", k, h, with[k], without[k])
					}
				}
			}
			expect(t, effective(t, p.User, "w1.carrel"), "user", "ana")
		})
	}
}

func TestClashingNameIsLeftToThePerson(t *testing.T) {
	p := setUp(t, t.TempDir(), "# mine\nHost other w1.carrel\n  User me\n", lab(t, host("w1"), host("w2")))
	expect(t, effective(t, p.User, "w1.carrel"), "user", "me")
	expect(t, effective(t, p.User, "w1.lab.carrel"), "user", "ana")
	expect(t, effective(t, p.User, "w2.carrel"), "user", "ana")
	if line := p.Names()["w1.carrel"]; line != 3 {
		t.Errorf("line %d", line)
	}
}

// CLI-04: an option given several times is there several times.
func TestRepeatedOptions(t *testing.T) {
	d := lab(t, host("w1"))
	for _, o := range []string{"RemoteForward 7001 127.0.0.1:7001", "RemoteForward=7002 127.0.0.1:7002", "SendEnv A B", "SetEnv X=1", "ServerAliveInterval 60"} {
		line, err := CheckOption(o)
		if err != nil {
			t.Fatal(err)
		}
		d.Options = append(d.Options, line)
	}
	p := setUp(t, t.TempDir(), "", d)
	got := effective(t, p.User, "w1.carrel")
	expect(t, got, "remoteforward", "7001 [127.0.0.1]:7001", "7002 [127.0.0.1]:7002")
	expect(t, got, "sendenv", "A", "B")
	expect(t, got, "setenv", "X=1")
	expect(t, got, "serveraliveinterval", "60")
	d.Options = d.Options[:1]
	write(t, p, d)
	expect(t, effective(t, p.User, "w1.carrel"), "remoteforward", "7001 [127.0.0.1]:7001")
}

func TestOptionsThatAreRefused(t *testing.T) {
	for _, o := range []string{"", "User", "User root", "proxycommand /bin/sh", "HostKeyAlias=x", "StrictHostKeyChecking no", "Host *", "Match all", "X\nHost y", "SetEnv A=\n  User root", "Include /etc/passwd", "UserKnownHostsFile x"} {
		if line, err := CheckOption(o); err == nil {
			t.Errorf("%q gives %q", o, line)
		}
	}
}

// CLI-07: blanks, quotes, percent and hash signs in paths.
func TestPathsWithSpecialCharacters(t *testing.T) {
	plain := t.TempDir()
	for _, odd := range []string{`My Tools`, `ana b'c`, `a#b "c"`, `h%h %% 100%`, `back\slash`, `$(touch x) ;&|`, "umläut", `star*[a]?`} {
		t.Run(odd, func(t *testing.T) {
			base := filepath.Join(t.TempDir(), odd)
			if err := os.MkdirAll(base, 0o700); err != nil {
				t.Fatal(err)
			}
			out := filepath.Join(base, "argv")
			script := filepath.Join(base, "program")
			if err := os.WriteFile(script, []byte("#!/bin/sh\nprintf '%s\\n' \"$0\" \"$@\" > \""+`$(dirname "$0")/argv`+"\"\n"), 0o700); err != nil {
				t.Fatal(err)
			}
			d := lab(t, host("w1"))
			d.ProxyArgv = []string{script, "proxy", "--config-dir", base}
			d.KnownHosts, d.Identity = filepath.Join(base, "known_hosts"), filepath.Join(base, "id_ed25519")
			userDir := base
			if strings.ContainsAny(odd, "%") {
				userDir = plain // an Include line cannot hold it, see below
			}
			p := setUp(t, userDir, "", d)
			got := effective(t, p.User, "w1.carrel")
			expect(t, got, "identityfile", strings.ReplaceAll(d.Identity, "%", "%%"))
			if err := exec.Command("ssh", "-F", p.User, "w1.carrel", "true").Run(); err == nil {
				t.Error("ssh succeeded without a server")
			}
			argv, err := os.ReadFile(out)
			if err != nil {
				t.Fatal(err)
			}
			if want := strings.Join([]string{script, "proxy", "--config-dir", base, "--workspace", "idw1", ""}, "\n"); string(argv) != want {
				t.Errorf("argv %q, want %q", argv, want)
			}
			if entries, _ := filepath.Glob("x"); len(entries) > 0 {
				t.Error("a command ran")
			}
		})
	}
	if _, err := PlaceFor("/tmp/50%/config", "/nowhere").IncludeLine(); err == nil {
		t.Error("a percent sign in an Include line was taken")
	}
	if line := includeLine(t, PlaceFor("/home/50%/.ssh/config", "/home/50%/.ssh")); line != "Include carrel/config" {
		t.Errorf("for a home with a percent sign %q", line)
	}
}

const messy = "Host a\r\n  HostName a.test   # note\n\n# c\n  ProxyCommand \"/opt/my tool/x\" \"p1\" \"p2\"\nHOST b\n\tProxyCommand ssh -o StrictHostKeyChecking=no -W %h:%p j\nIdentityFile=\"~/k y\"\nMatch host z\n  user q"

// CLI-16: every byte outside our own line stays, and taking the line out gives the old file back.
func TestEveryOtherByteStays(t *testing.T) {
	for _, content := range []string{"", "\n", messy, messy + "\n", strings.ReplaceAll(messy, "\n", "\r\n"), "# only a comment", "Host " + strings.Repeat("x", 3000) + "\n"} {
		dir := t.TempDir()
		p := PlaceFor(filepath.Join(dir, "config"), dir)
		if err := os.WriteFile(p.User, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if _, err := p.Install(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		got, _ := os.ReadFile(p.User)
		line, rest, _ := strings.Cut(string(got), "\n")
		if strings.TrimSpace(line) != includeLine(t, p) || rest != content {
			t.Errorf("%.40q: begins %q, rest changed: %t", content, line, rest != content)
		}
		if strings.Contains(content, "\r\n") && strings.HasPrefix(content, "Host a\r\n") && !strings.HasSuffix(line, "\r") {
			t.Errorf("the line end is not the file's: %q", line)
		}
		if info, _ := os.Stat(p.User); info.Mode().Perm() != 0o644 {
			t.Errorf("mode %o", info.Mode().Perm())
		}
		if _, err := p.Uninstall(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got, _ := os.ReadFile(p.User); string(got) != content {
			t.Errorf("after removal %q, was %q", got, content)
		}
	}
}

func TestOurLineIsMovedToTheTop(t *testing.T) {
	dir := t.TempDir()
	p := PlaceFor(filepath.Join(dir, "config"), dir)
	if err := os.WriteFile(p.User, []byte("Host *\n  User x\n"+includeLine(t, p)+"\nHost y\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if ok, _ := p.Included(); ok {
		t.Error("counts as included below Host *")
	}
	if _, err := p.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(p.User); string(got) != includeLine(t, p)+"\nHost *\n  User x\nHost y\n" {
		t.Errorf("%q", got)
	}
}

// CLI-05: links stay links, also relative and two deep; a new file is 0600 in a directory of 0700; read-only is refused.
func TestLinksModesAndReadOnly(t *testing.T) {
	dir := t.TempDir()
	dotfiles, sshDir := filepath.Join(dir, "dotfiles"), filepath.Join(dir, "ssh")
	for _, d := range []string{dotfiles, sshDir} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	target := filepath.Join(dotfiles, "ssh_config")
	must(t, os.WriteFile(target, []byte("Host a\n"), 0o640))
	must(t, os.Symlink("ssh_config", filepath.Join(dotfiles, "hop")))
	must(t, os.Symlink("../dotfiles/hop", filepath.Join(sshDir, "config")))
	p := PlaceFor(filepath.Join(sshDir, "config"), sshDir)
	if _, err := p.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	got, _ := os.ReadFile(target)
	info, _ := os.Stat(target)
	if string(got) != includeLine(t, p)+"\nHost a\n" || info.Mode().Perm() != 0o640 {
		t.Errorf("target %q, mode %o", got, info.Mode().Perm())
	}
	for _, l := range []string{filepath.Join(sshDir, "config"), filepath.Join(dotfiles, "hop")} {
		if i, err := os.Lstat(l); err != nil || i.Mode()&os.ModeSymlink == 0 {
			t.Errorf("%s is no link any more", l)
		}
	}
	must(t, os.WriteFile(target, []byte("Host b\n"), 0o640))
	must(t, os.Chmod(target, 0o440))
	if _, err := p.Install(t.Context()); err == nil || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("read-only: %v", err)
	}
	if got, _ := os.ReadFile(target); string(got) != "Host b\n" {
		t.Errorf("read-only file was changed: %q", got)
	}
	fresh := PlaceFor(filepath.Join(dir, "new", "config"), filepath.Join(dir, "new"))
	if _, err := fresh.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	file, _ := os.Stat(fresh.User)
	folder, _ := os.Stat(filepath.Dir(fresh.User))
	if file.Mode().Perm() != 0o600 || folder.Mode().Perm() != 0o700 {
		t.Errorf("new: file %o, directory %o", file.Mode().Perm(), folder.Mode().Perm())
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestTwoAtOnceMakeOneLine(t *testing.T) {
	dir := t.TempDir()
	p := PlaceFor(filepath.Join(dir, "config"), dir)
	must(t, os.WriteFile(p.User, []byte("Host a\n"), 0o600))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := p.Install(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got, _ := os.ReadFile(p.User); string(got) != includeLine(t, p)+"\nHost a\n" {
		t.Errorf("%q", got)
	}
}

// A8, T-25: whatever a gateway sends, ssh sees exactly the keys that we write, or nothing is written.
func TestHostileServerStrings(t *testing.T) {
	bits := []string{"\n", "\r", "\nProxyCommand touch pwned\n", "`id`", "$(id)", ";", "'", `"`, "%r", "${HOME}", " ", "\t", "*", "!", "Match all", "../", "-oProxyCommand=x", "\x00", "é", "w1"}
	rng := rand.New(rand.NewPCG(1, 2))
	baseline := effectiveOf(t, lab(t, host("w1")))
	tried := 0
	for range 2000 {
		d := lab(t, host("w1"))
		evil := bits[rng.IntN(len(bits))] + bits[rng.IntN(len(bits))]
		h := &d.Hosts[0]
		target := []*string{&h.WorkspaceID, &h.Workspace, &h.Login, &h.Principal, &d.Name, &d.CAKeys[0]}[rng.IntN(6)]
		if rng.IntN(2) == 0 {
			*target += evil
		} else {
			*target = evil + *target
		}
		if rng.IntN(2) == 0 { // keep it consistent, so that only the patterns stand in the way
			h.Principal = h.Workspace + ".carrel." + h.WorkspaceID
		}
		if _, err := Render([]Deployment{d}, Entries([]Deployment{d}, free), false); err != nil {
			continue
		}
		if h.Workspace != "w1" && !workspacePattern.MatchString(h.Workspace) {
			t.Fatalf("taken: %q", h.Workspace)
		}
		tried++
		if tried > 40 {
			continue // ssh is slow; the patterns above are the check
		}
		got := effectiveOf(t, d)
		for key := range got {
			if _, ok := baseline[key]; !ok {
				t.Errorf("%q adds %s", *target, key)
			}
		}
	}
	if tried == 0 {
		t.Error("no accepted input was tried")
	}
}

func effectiveOf(t *testing.T, d Deployment) map[string][]string {
	t.Helper()
	entries := Entries([]Deployment{d}, free)
	content, err := Render([]Deployment{d}, entries, false)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "config")
	must(t, os.WriteFile(file, content, 0o600))
	return effective(t, file, entries[0].Alias)
}

func FuzzRender(f *testing.F) {
	f.Add("id1", "w1", "ana", "w1.carrel.id1", "lab")
	f.Add("id1\nHost *", "w1", "ana", "w1.carrel.id1", "lab")
	f.Fuzz(func(t *testing.T, id, name, login, principal, deployment string) {
		d := lab(t, Host{WorkspaceID: id, Workspace: name, Login: login, Principal: principal})
		d.Name = deployment
		content, err := Render([]Deployment{d}, Entries([]Deployment{d}, free), false)
		if err != nil {
			return
		}
		if n := strings.Count(string(content), "\n"); n != 22 {
			t.Errorf("%d lines:\n%s", n, content)
		}
	})
}

func TestKnownHostsOnlyTrustsTheCAForOurNames(t *testing.T) {
	d := lab(t)
	got, err := d.KnownHostsFile()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(got), "\n@cert-authority *.carrel.* ssh-ed25519 ") {
		t.Errorf("%s", got)
	}
	for _, bad := range []string{"", "x", caKey(t) + "\n* " + caKey(t), `command="x" ` + caKey(t)} {
		d.CAKeys = []string{bad}
		if out, err := d.KnownHostsFile(); err == nil {
			t.Errorf("%q gives %q", bad, out)
		}
	}
}

func TestQuoteShellArrivesAsGiven(t *testing.T) {
	args := []string{"", "a b", "it's", `"q"`, "$HOME", "`id`", "a\nb", "\\", "*", "-n", "é", "!x", "~", "#c"}
	quoted := make([]string, len(args))
	for i, a := range args {
		quoted[i] = QuoteShell(a)
	}
	out, err := exec.Command("/bin/sh", "-c", `printf '%s\0' `+strings.Join(quoted, " ")).Output()
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Join(args, "\x00") + "\x00"; string(out) != want {
		t.Errorf("%q, want %q", out, want)
	}
}
