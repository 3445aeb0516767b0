// Package sshconfig keeps the managed ssh files: the included Host blocks, known_hosts, and the one Include line.
package sshconfig

import (
	"fmt"
	"regexp"
	"strings"

	"golang.org/x/crypto/ssh"
)

// What a gateway may send, checked again here: it all ends in files that ssh obeys (threat T-25, advisory A8).
var (
	idPattern        = regexp.MustCompile(`^[a-z0-9]{1,64}$`)
	workspacePattern = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$`)
	loginPattern     = regexp.MustCompile(`^[a-z_][a-z0-9_.-]{0,31}$`)
	namePattern      = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$`)
	optionPattern    = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9]*$`)
)

// Suffix ends every host name of ours.
const Suffix = ".carrel"

// Host is one workspace.
type Host struct {
	WorkspaceID string
	Workspace   string // name
	Login       string
	Principal   string // of its host certificate: NAME.carrel.ID
}

// Deployment is what the managed file says about one gateway.
type Deployment struct {
	Name       string   // local name
	Primary    bool     // its workspaces are NAME.carrel, others' NAME.<deployment>.carrel
	ProxyArgv  []string // command to which `--workspace ID` is added
	KnownHosts string   // path
	Identity   string   // path of the device key
	CAKeys     []string // authorized_keys form
	Options    []string // lines for every block, from CheckOption
	Hosts      []Host
}

// Check says what is wrong with a host that a gateway sent.
func (h Host) Check() error {
	switch {
	case !idPattern.MatchString(h.WorkspaceID):
		return fmt.Errorf("workspace id %.60q is malformed", h.WorkspaceID)
	case !workspacePattern.MatchString(h.Workspace):
		return fmt.Errorf("workspace name %.60q is malformed", h.Workspace)
	case !loginPattern.MatchString(h.Login):
		return fmt.Errorf("login %.60q of workspace %s is malformed", h.Login, h.Workspace)
	case h.Principal != h.Workspace+Suffix+"."+h.WorkspaceID:
		return fmt.Errorf("principal %.90q of workspace %s is not NAME.carrel.ID", h.Principal, h.Workspace)
	}
	return nil
}

// Check says what is wrong with what a gateway sent about itself and its workspaces.
func (d Deployment) Check() error {
	if !namePattern.MatchString(d.Name) {
		return fmt.Errorf("deployment name %.60q is malformed", d.Name)
	}
	for _, h := range d.Hosts {
		if err := h.Check(); err != nil {
			return err
		}
	}
	_, err := d.KnownHostsFile()
	return err
}

// KnownHostsFile returns the content of the deployment's known_hosts: the host CA's keys for all workspaces.
func (d Deployment) KnownHostsFile() ([]byte, error) {
	var b strings.Builder
	b.WriteString("# Written by carrel; changes are lost.\n")
	for _, line := range d.CAKeys {
		if strings.ContainsAny(line, "\n\r") {
			return nil, fmt.Errorf("host CA key of more than one line")
		}
		key, _, options, _, err := ssh.ParseAuthorizedKey([]byte(line))
		if err != nil {
			return nil, fmt.Errorf("host CA key %.60q: %w", line, err)
		}
		if len(options) > 0 {
			return nil, fmt.Errorf("host CA key %.60q has options", line)
		}
		fmt.Fprintf(&b, "@cert-authority *%s.* %s", Suffix, ssh.MarshalAuthorizedKey(key)) // ends with a line end
	}
	return []byte(b.String()), nil
}

// ours are the options that a block needs as they are; a person's own must not replace them.
var ours = map[string]bool{
	"host": true, "match": true, "include": true, "hostname": true, "hostkeyalias": true, "user": true, "proxycommand": true,
	"proxyjump": true, "proxyusefdpass": true, "userknownhostsfile": true, "globalknownhostsfile": true, "stricthostkeychecking": true,
	"identityfile": true, "identitiesonly": true, "canonicalizehostname": true, "knownhostscommand": true, "verifyhostkeydns": true,
	"updatehostkeys": true, "port": true,
}

// CheckOption returns an option such as `RemoteForward 7001 127.0.0.1:7001` as the line for the managed file, or says
// what is wrong with it.
func CheckOption(option string) (string, error) {
	option = strings.TrimSpace(option)
	keyword, value, _ := strings.Cut(option, " ")
	if k, v, ok := strings.Cut(keyword, "="); ok {
		keyword, value = k, strings.TrimSpace(v+" "+value)
	}
	value = strings.TrimSpace(value)
	switch {
	case !optionPattern.MatchString(keyword) || value == "":
		return "", fmt.Errorf("ssh option %q: write `KEYWORD VALUE` as in ssh_config, such as 'RemoteForward 7001 127.0.0.1:7001'", option)
	case strings.ContainsFunc(value, func(r rune) bool { return r < 0x20 || r == 0x7f }):
		return "", fmt.Errorf("ssh option %s: control characters are not allowed", keyword)
	case ours[strings.ToLower(keyword)]:
		return "", fmt.Errorf("ssh option %s: carrel sets it itself, so that each name leads to its own workspace", keyword)
	}
	return keyword + " " + value, nil
}
