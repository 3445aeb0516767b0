# The few calls to the engine's HTTP API that the scripts make. To be sourced. No docker client is needed, so that
# an engine of any version and a client of any other behave the same.

# engine_socket prints the path of the engine's unix socket; DOCKER_HOST counts where it names one.
engine_socket() {
  case ${DOCKER_HOST:-} in
    unix://*) echo "${DOCKER_HOST#unix://}" ;;
    "") echo /var/run/docker.sock ;;
    *) echo "DOCKER_HOST is $DOCKER_HOST: Carrel's agent uses an engine on this machine, so unset it or point it at a unix:// socket" >&2; return 1 ;;
  esac
}

# engine_call PATH [CURL OPTION...] prints the answer's body; fails where the engine answers an error or nothing.
engine_call() {
  local path=$1 socket
  shift
  socket=$(engine_socket) || return 1
  curl --silent --show-error --fail-with-body --unix-socket "$socket" "$@" "http://engine$path"
}

# engine_version prints the engine's version, or fails.
engine_version() {
  local answer
  answer=$(engine_call /version --max-time 10 2>/dev/null) || return 1
  grep -o '"Version":"[^"]*"' <<<"$answer" | head -n 1 | cut -d '"' -f 4
}

# engine_image_label IMAGE LABEL prints the label's value; nothing where image or label is missing.
engine_image_label() {
  engine_call "/images/$1/json" --max-time 30 2>/dev/null | sed -n "s|.*\"$2\":\"\\([^\"]*\\)\".*|\\1|p"
}

# engine_image_id IMAGE prints the image's id; nothing where there is none.
engine_image_id() {
  engine_call "/images/$1/json" --max-time 30 2>/dev/null | sed -n 's|^{"Id":"\([^"]*\)".*|\1|p'
}

# engine_import IMAGE TAR [CHANGE...] makes an image of a root file system (a tar, or - for stdin).
engine_import() {
  local image=$1 tar=$2 query change answer
  shift 2
  query="fromSrc=-&repo=${image%:*}&tag=${image##*:}"
  for change in "$@"; do query+="&changes=$(url_encode "$change")"; done
  answer=$(engine_call "/images/create?$query" -X POST --upload-file "$tar" -H 'Content-Type: application/x-tar') || {
    echo "$answer" >&2
    return 1
  }
  # The engine answers 200 first and may report its failure later in the stream.
  if grep -q '"error"' <<<"$answer"; then
    echo "$answer" >&2
    return 1
  fi
}

# engine_pull IMAGE pulls and names the failure that the stream reports.
engine_pull() {
  local answer name=$1 query
  if [[ $name == *@* || ${name##*/} != *:* ]]; then query="fromImage=$(url_encode "$name")"; else query="fromImage=$(url_encode "${name%:*}")&tag=${name##*:}"; fi
  [[ $name == *@* || ${name##*/} == *:* ]] || query+="&tag=latest"
  answer=$(engine_call "/images/create?$query" -X POST 2>&1) || { echo "$answer" >&2; return 1; }
  if grep -q '"error"' <<<"$answer"; then
    grep '"error"' <<<"$answer" >&2
    return 1
  fi
}

# engine_tag IMAGE NAME:TAG
engine_tag() { engine_call "/images/$1/tag?repo=${2%:*}&tag=${2##*:}" -X POST; }

url_encode() {
  local text=$1 out="" i c
  for ((i = 0; i < ${#text}; i++)); do
    c=${text:i:1}
    case $c in
      [a-zA-Z0-9.~_-]) out+=$c ;;
      *) out+=$(printf '%%%02X' "'$c") ;;
    esac
  done
  printf '%s' "$out"
}
