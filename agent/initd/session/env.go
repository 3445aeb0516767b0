package session

import (
	"bufio"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Bounds on the variables that a client may send for one command.
const (
	maxClientVars  = 128
	maxClientBytes = 64 << 10
)

// acceptsEnv tells whether a client may set name. Refused are the names that this server sets, and those that change what
// a program runs before it has read its arguments (loaders, interpreters, shells).
func acceptsEnv(name string) bool {
	if !validEnvName(name) {
		return false
	}
	for _, prefix := range []string{
		"CARREL_", "NVIDIA_", "CUDA_", "SSH_", "LD_", "DYLD_", "MALLOC_", "PYTHON", "PERL", "RUBY", "GCONV_", "GIT_SSH", "BASH_FUNC_",
	} {
		if strings.HasPrefix(name, prefix) {
			return false
		}
	}
	return !slices.Contains([]string{
		"PATH", "HOME", "USER", "LOGNAME", "SHELL", "MAIL", "PWD", "IFS", "ENV", "BASH_ENV", "BASHOPTS", "SHELLOPTS", "PS4",
		"PROMPT_COMMAND", "CDPATH", "GLOBIGNORE", "GLIBC_TUNABLES", "HOSTALIASES", "LOCALDOMAIN", "RES_OPTIONS", "NLSPATH",
		"LOCPATH", "NODE_OPTIONS", "JAVA_TOOL_OPTIONS", "XDG_RUNTIME_DIR", "ZDOTDIR", "TMPDIR", "GODEBUG",
	}, name)
}

func validEnvName(name string) bool {
	if name == "" || len(name) > 256 || name[0] >= '0' && name[0] <= '9' {
		return false
	}
	for _, c := range []byte(name) {
		if c != '_' && (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') {
			return false
		}
	}
	return true
}

// environ merges lists of NAME=value; the last one of a name wins, order is kept.
func environ(lists ...[]string) []string {
	at := make(map[string]int)
	var out []string
	for _, kv := range slices.Concat(lists...) {
		name, _, ok := strings.Cut(kv, "=")
		if !ok || name == "" {
			continue
		}
		if i, seen := at[name]; seen {
			out[i] = kv
			continue
		}
		at[name] = len(out)
		out = append(out, kv)
	}
	return out
}

// defaultPath is for images whose ENV has no PATH: Docker's own default.
const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// commandEnv is the environment of one command: the image's and Carrel's, what the client sent, then what is fixed.
// The SSH_* values have OpenSSH's form; the client's address is not known here, so it is given as loopback.
func (s *Server) commandEnv(client []string, shell string) []string {
	fixed := []string{
		"HOME=" + s.cfg.Account.Home, "USER=" + s.cfg.Account.Login, "LOGNAME=" + s.cfg.Account.Login, "SHELL=" + shell,
		"SSH_CLIENT=127.0.0.1 65535 22", "SSH_CONNECTION=127.0.0.1 65535 127.0.0.1 22",
	}
	return environ([]string{defaultPath}, s.cfg.Env, client, fixed)
}

// loginShell reads the user's shell from the passwd file as it is now (SSH-28), by login first, then by uid. An entry
// without a shell, or one that is not executable, gives /bin/bash or /bin/sh; an image with none gives "".
func loginShell(passwdFile string, acc Account) string {
	if shell := passwdShell(passwdFile, acc); shell != "" && executable(shell) {
		return shell
	}
	for _, shell := range []string{"/bin/bash", "/bin/sh", "/bin/ash"} {
		if executable(shell) {
			return shell
		}
	}
	return ""
}

func passwdShell(passwdFile string, acc Account) string {
	f, err := os.Open(passwdFile)
	if err != nil {
		return ""
	}
	defer f.Close()
	byUID, uid := "", strconv.Itoa(acc.UID)
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Split(lines.Text(), ":")
		if len(fields) < 7 {
			continue
		}
		if fields[0] == acc.Login {
			return fields[6]
		}
		if fields[2] == uid && byUID == "" {
			byUID = fields[6]
		}
	}
	return byUID
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}
