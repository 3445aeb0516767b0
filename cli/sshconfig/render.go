package sshconfig

import (
	"fmt"
	"sort"
	"strings"
)

const head = `# Written by carrel; changes are lost. Your own options: carrel ssh-config --ssh-option 'KEYWORD VALUE'
`

// Entry is a Host block: the name that ssh takes and the workspace that it leads to.
type Entry struct {
	Alias      string
	Deployment string
	Host       Host
}

// Entries returns the blocks of deployments by alias. taken tells which aliases the person's own configuration already
// has: for these the name with the deployment in it is used.
func Entries(deployments []Deployment, taken func(alias string) bool) []Entry {
	var entries []Entry
	for _, d := range deployments {
		for _, h := range d.Hosts {
			alias := h.Workspace + Suffix
			if !d.Primary || taken(alias) {
				alias = h.Workspace + "." + d.Name + Suffix
			}
			entries = append(entries, Entry{Alias: alias, Deployment: d.Name, Host: h})
		}
	}
	sort.Slice(entries, func(i, j int) bool { return entries[i].Alias < entries[j].Alias })
	return entries
}

// Render returns the managed file. windows chooses how the ProxyCommand is quoted.
func Render(deployments []Deployment, entries []Entry, windows bool) ([]byte, error) {
	byName := map[string]Deployment{}
	for _, d := range deployments {
		if err := d.Check(); err != nil {
			return nil, fmt.Errorf("deployment %s: %w", d.Name, err)
		}
		byName[d.Name] = d
	}
	var b strings.Builder
	b.WriteString(head)
	for _, e := range entries {
		if err := writeBlock(&b, byName[e.Deployment], e, windows); err != nil {
			return nil, err
		}
	}
	// What follows the Include in the person's file must not fall under the last Host.
	b.WriteString("\nMatch all\n")
	return []byte(b.String()), nil
}

func writeBlock(b *strings.Builder, d Deployment, e Entry, windows bool) error {
	argv := append(append([]string{}, d.ProxyArgv...), "--workspace", e.Host.WorkspaceID)
	proxy, err := proxyCommand(argv, windows)
	if err != nil {
		return err
	}
	known, err := pathValue(d.KnownHosts)
	if err != nil {
		return err
	}
	identity, err := pathValue(d.Identity)
	if err != nil {
		return err
	}
	fmt.Fprintf(b, "\nHost %s\n", e.Alias)
	for _, o := range d.Options {
		fmt.Fprintf(b, "  %s\n", o)
	}
	for _, line := range [][2]string{
		{"HostName", e.Alias},
		{"HostKeyAlias", e.Host.Principal},
		{"User", e.Host.Login},
		{"ProxyCommand", proxy},
		{"UserKnownHostsFile", known},
		{"GlobalKnownHostsFile", "none"},
		{"StrictHostKeyChecking", "yes"},
		{"UpdateHostKeys", "no"},
		{"IdentityFile", identity},
		{"IdentitiesOnly", "yes"},
		{"CanonicalizeHostname", "no"},
		{"ForwardAgent", "no"},
		{"ForwardX11", "no"},
		{"PermitLocalCommand", "no"},
		{"Ciphers", "^aes128-gcm@openssh.com"},
		{"ServerAliveInterval", "15"},
		{"ServerAliveCountMax", "3"},
	} {
		fmt.Fprintf(b, "  %s %s\n", line[0], line[1])
	}
	return nil
}

// proxyCommand writes an argv as ssh's ProxyCommand: quoted for the shell that ssh runs it with, `%` doubled for ssh.
func proxyCommand(argv []string, windows bool) (string, error) {
	quoted := make([]string, len(argv))
	for i, a := range argv {
		if strings.ContainsAny(a, "\n\r\x00") {
			return "", fmt.Errorf("%q: a line break cannot stand in an ssh configuration", a)
		}
		if windows {
			quoted[i] = quoteWindows(a)
		} else {
			quoted[i] = QuoteShell(a)
		}
	}
	return strings.ReplaceAll(strings.Join(quoted, " "), "%", "%%"), nil
}

// pathValue quotes a path for options that expand `%` and `${}` (ssh_config(5), TOKENS).
func pathValue(path string) (string, error) {
	if strings.ContainsAny(path, "\n\r\x00") || strings.Contains(path, "${") {
		return "", fmt.Errorf("path %q: a line break or `${` cannot stand in an ssh configuration; set CARREL_CONFIG_DIR to another directory", path)
	}
	return quoteWord(strings.ReplaceAll(path, "%", "%%")), nil
}

// quoteWord quotes one argument for ssh's own parser (argv_split in OpenSSH's misc.c: in double quotes `\"` and `\\` are escapes).
func quoteWord(s string) string {
	if plain(s) {
		return s
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}

// QuoteShell quotes one argument for a POSIX shell, which csh and fish read in the same way.
func QuoteShell(s string) string {
	if s != "" && plain(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// quoteWindows quotes one argument as CommandLineToArgvW reads it; paths hold no `"` there.
func quoteWindows(s string) string {
	if s != "" && plain(strings.ReplaceAll(s, `\`, "/")) {
		return s
	}
	return `"` + strings.ReplaceAll(s, `"`, `\"`) + `"`
}

func plain(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("/._-+,:@=", r)
	})
}
