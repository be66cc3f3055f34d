set -x
cd /root/st && cat x.* | tar xf - && rm x.*; cd -
export PIP_NO_INDEX=1 PIP_FIND_LINKS=/root/st/x PIP_CONFIG_FILE=/dev/null
(mkdir -p /root/llama && cd /root/llama && tar xzf /root/st/x/llama-src.tgz && cmake -B b -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DBUILD_SHARED_LIBS=OFF > /root/llama.log 2>&1 && nice -n 10 cmake --build b --target llama-server -j 8 >> /root/llama.log 2>&1; echo "llama rc $?" >> /root/llama.log) &
timeout 330 python3 native/check/install.py /root/st/x 2>&1 | grep -v "^ *[0-9]* /\|Building" | tee $OUT/install.log
wait
tail -2 /root/llama.log; ls -la /root/llama/b/bin/llama-server
